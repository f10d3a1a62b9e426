"""What the foreign engines need: their environments from the package index, and target and draft in their own formats.

Everything lies under one folder and is made once; a step that is done is not repeated. What a step says goes to its log,
and a step that fails is quoted. Nothing is known here of how an engine is asked.
"""

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.artifact import file_hash, fingerprint
from pipeline import gguf_model, gguf_vocabulary
from pipeline.choices import GgufType

MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
RECORDS = ("gate.json", "provenance.json")  # of an export; another run of the same draft writes others
WORKER = Path(__file__).with_name("foreign_worker.py")
# AVX2 and what comes with it, and nothing that a virtual machine may name and not have.
CPU = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2"))]


class StepError(Exception):
    """A step failed; its own words."""


@dataclass(frozen=True)
class Contestant:
    """An engine as it is started. ``target`` and ``drafts`` are files in its format, drafts by the name of the format."""

    engine: str
    command: list[str]
    target: Path
    drafts: dict[str, Path]
    environment: dict[str, str] = field(default_factory=dict)
    format: str = ""


def run(command: Sequence[str | Path], log: Path, **environment: str) -> None:
    """Run a step at low priority.

    Raises:
        StepError: with the last line that it wrote.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("a") as stream:
        stream.write(" ".join(map(str, command)) + "\n")
        stream.flush()
        done = subprocess.run(list(map(str, command)), env=kept | environment, stdout=stream, stderr=stream, check=False)
    if done.returncode:
        raise StepError(f"{Path(command[0]).name} {command[1]}: exit code {done.returncode}: {last_words(log)}")


def last_words(log: Path) -> str:
    """The last lines of a log that say something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def once(place: Path, make: Callable[[], None]) -> Path:
    """``place``, made if its mark is not there."""
    mark = place.with_name(f"{place.name}.done")
    if not mark.is_file():
        make()
        mark.touch()
    return place


def environment(folder: Path, packages: Sequence[str], log: Path, **variables: str) -> Path:
    """The Python of a virtual environment that holds ``packages``."""
    python = folder / "bin" / "python"

    def make() -> None:
        if not python.is_file():
            venv.create(folder, with_pip=True)
        run([python, "-m", "pip", "install", *packages], log, **variables)

    once(folder, make)
    return python


def openvino(work: Path, target: Path, export: Path) -> list[Contestant]:
    """OpenVINO GenAI with float16 and 8-bit weights, converted by Optimum in the same environment."""
    log = work / "openvino.log"
    python = environment(work / "openvino", ["optimum-intel[openvino]", "nncf", "openvino-genai", "openvino-tokenizers"], log)

    def converted(name: str, source: Path, weights: str) -> Path:
        place = work / f"{name}-{source_name(source)}-{weights}-openvino"
        command = [python.with_name("optimum-cli"), "export", "openvino", "--model", source]
        options = ["--task", "text-generation-with-past", "--weight-format", weights, place]
        return once(place, lambda: run([*command, *options], log, HF_HUB_OFFLINE="1"))

    targets = {weights: converted("target", target, weights) for weights in ("fp16", "int8")}
    drafts = {weights: converted("draft", export, weights) for weights in ("fp16", "int8")}
    command = [str(python), "-P", str(WORKER), "openvino-genai"]
    return [
        Contestant("openvino-genai", command, targets["fp16"], drafts, format="fp16"),
        Contestant("openvino-genai", command, targets["int8"], {"int8": drafts["int8"]}, format="int8"),
    ]


def source_name(source: Path) -> str:
    """A folder's name, its parent's, for names of exports are all alike, and a hash of the model, which may be replaced."""
    kept = [path for path in sorted(source.iterdir()) if path.suffix in MODEL_FILES and path.name not in RECORDS]
    return f"{source.parent.name}-{source.name}-{fingerprint({path.name: file_hash(path) for path in kept})[:8]}"


def llama_cpp(work: Path, target: Path, export: Path, engine: str) -> list[Contestant]:
    """``engine`` of one build of llama.cpp, that which the sources of llama-cpp-python carry."""
    log = work / "llama.log"
    build = _built(work, log)
    formats = (GgufType.f16, GgufType.q8_0)
    targets = {kind.name: gguf_file(work, "target", target, kind) for kind in formats}
    drafts = {kind.name: gguf_file(work, "draft", export, kind) for kind in formats}
    if engine == "llama-server":
        python, variables = sys.executable, {"LLAMA_SERVER": str(build / "bin" / "llama-server")}
    else:
        python, variables = str(work / "llama" / "bin" / "python"), {"LLAMA_CPP_LIB_PATH": str(build / "bin")}
    command = [python, "-P", str(WORKER), engine]
    return [
        Contestant(engine, command, targets["f16"], drafts, variables, "f16"),
        Contestant(engine, command, targets["q8_0"], {"q8_0": drafts["q8_0"]}, variables, "q8_0"),
    ]


def _built(work: Path, log: Path) -> Path:
    """llama-cpp-python installed, its llama.cpp compiled with the server; gives the folder of the compiled files."""
    python = environment(work / "llama", ["cmake", "ninja"], log)
    sources, build = work / "llama-sources", work / "llama-build"

    def fetch() -> None:
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", sources]
        run([python, "-m", "pip", "download", *options, "llama-cpp-python"], log)
        [archive] = sources.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(sources, filter="data")

    def compile_() -> None:
        cmake = ["nice", "-n", "19", python.with_name("cmake")]
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", *CPU]
        vendored = next(sources.glob("llama_cpp_python-*/vendor/llama.cpp"))
        run([*cmake, "-S", vendored, "-B", build, "-G", "Ninja", *options], log)
        run([*cmake, "--build", build, "-j1", "--target", "llama", "mtmd", "llama-server"], log)

    once(sources, fetch)
    once(build, compile_)
    package = next(path for path in sources.glob("llama_cpp_python-*") if path.is_dir())
    install = [python, "-m", "pip", "install", package]
    once(work / "llama-python", lambda: run(install, log, CMAKE_ARGS="-DLLAMA_BUILD=OFF"))
    return build


def gguf_file(work: Path, name: str, source: Path, kind: GgufType) -> Path:
    """A folder of safetensors as a GGUF file, by the writer of the export."""
    place = work / f"{name}-{source_name(source)}-{kind.name}.gguf"

    def write() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        found = gguf_vocabulary.build(AutoTokenizer.from_pretrained(source))
        gguf_model.write(model, gguf_vocabulary.padded(found, model.config.vocab_size), kind, name, place)

    return once(place, write)
