"""A script: one engine in an environment of its own decodes greedily, alone and with drafts, whenever it is its turn.

    python -P foreign_worker.py ENGINE SETTINGS

SETTINGS is JSON: the target's and the drafts' files, threads, and the longest sequence. Each line on stdin is a turn, each
line on stdout its answer; between turns the process sleeps. It reads what engines report and imports nothing of Draftsmith,
but for Draftsmith's own engine.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Decoded:
    """Ids, and how many of the ``proposed`` draft tokens were accepted in ``rounds`` target forwards after prefill."""

    tokens: list[int]
    proposed: int = 0
    accepted: int = 0
    rounds: int = 0


class Draftsmith:
    """This project's engine on packed float32 weights; its drafts are as they were trained."""

    def __init__(self, target: str, drafts: dict[str, str], threads: int, longest: int) -> None:
        import torch
        import transformers

        import speculative
        from pipeline import draft

        torch.set_num_threads(threads)
        self.generate, self.version = speculative.generate, f"torch {torch.__version__}"
        self.target = speculative.pack(transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
        self.drafts = {name: draft.load(Path(path), torch.float32) for name, path in drafts.items()}
        for one in self.drafts.values():
            speculative.pack(one.model)

    def decode(self, prompt: list[int], new_tokens: int, draft: str | None, drafted: int) -> Decoded:
        helper = self.drafts[draft] if draft else None
        done = self.generate(
            self.target, helper, [prompt], max_new_tokens=new_tokens, num_draft_tokens=drafted, eos_token_ids=[]
        )
        counts = done.acceptance[0]
        return Decoded(done.tokens[0], counts.proposed, counts.accepted, counts.target_forwards if draft else 0)


class OpenVino:
    """OpenVINO GenAI: continuous batching with and without a draft model, no prefix kept between calls."""

    def __init__(self, target: str, drafts: dict[str, str], threads: int, longest: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.version = f"openvino-genai {openvino_genai.__version__}"
        self.options = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
        self.pipelines = {None: self._pipeline(target)}
        for name, path in drafts.items():
            helper = openvino_genai.draft_model(path, "CPU", **self.options)
            self.pipelines[name] = self._pipeline(target, draft_model=helper)

    def _pipeline(self, target: str, **draft: Any) -> Any:
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
        return self.genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **draft, **self.options)

    def decode(self, prompt: list[int], new_tokens: int, draft: str | None, drafted: int) -> Decoded:
        config = self.genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        if drafted:
            config.num_assistant_tokens = drafted
        ids = self.numpy.array([prompt], dtype=self.numpy.int64)
        inputs = self.genai.TokenizedInputs(self.openvino.Tensor(ids), self.openvino.Tensor(self.numpy.ones_like(ids)))
        done = self.pipelines[draft].generate(inputs, config)
        tokens = list(done.tokens[0])
        if draft is None:
            return Decoded(tokens)
        accepted = done.extended_perf_metrics.get_num_accepted_tokens()
        rounds = len(tokens) - 1 - accepted
        return Decoded(tokens, rounds * drafted, accepted, rounds)


class LlamaCppPython:
    """llama-cpp-python with a second model behind its interface for drafts."""

    def __init__(self, target: str, drafts: dict[str, str], threads: int, longest: int) -> None:
        import llama_cpp
        import numpy
        from llama_cpp.llama_speculative import LlamaDraftModel

        options = {"n_ctx": longest, "n_threads": threads, "n_threads_batch": threads, "verbose": False}

        class Counting(llama_cpp.Llama):
            evaluations = 0

            def eval(self, tokens: Any) -> None:
                self.evaluations += 1
                super().eval(tokens)

        class Drafter(LlamaDraftModel):
            """Greedy drafts of a model that keeps what it has read."""

            def __init__(self, path: str) -> None:
                self.model = llama_cpp.Llama(path, **options)
                self.length, self.proposed, self.read = 1, 0, []

            def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
                text = input_ids.tolist()
                same = next((i for i, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b), len(self.read))
                same = min(same, len(text) - 1)
                self.model.n_tokens = same
                for number in range(self.length):
                    self.model.eval(text[same:] if number == 0 else text[-1:])
                    logits = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
                    best = numpy.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax()
                    text.append(int(best))
                self.read, self.proposed = text[:-1], self.proposed + self.length
                return numpy.array(text[-self.length :], dtype=numpy.intc)

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.models = {None: Counting(target, **options)}
        for name, path in drafts.items():
            self.models[name] = Counting(target, **options, logits_all=True, draft_model=Drafter(path))

    def decode(self, prompt: list[int], new_tokens: int, draft: str | None, drafted: int) -> Decoded:
        model = self.models[draft]
        model.reset()
        model.evaluations = 0
        if draft is not None:
            model.draft_model.length, model.draft_model.proposed, model.draft_model.read = drafted, 0, []
        tokens = []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == new_tokens:
                break
        if draft is None:
            return Decoded(tokens)
        rounds = model.evaluations - 1  # the first is the prompt's
        return Decoded(tokens, model.draft_model.proposed, len(tokens) - 1 - rounds, rounds)


class LlamaServer:
    """llama.cpp's own server, asked over HTTP on this machine: one for each draft and K, which no request can change.

    A server starts when it is first asked, which is for warmth.
    """

    def __init__(self, target: str, drafts: dict[str, str], threads: int, longest: int) -> None:
        self.binary, self.drafts = os.environ["LLAMA_SERVER"], drafts
        said = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=False)
        self.version = " ".join((said.stderr or said.stdout).split()[:4])
        self.common = ["-m", target, "-c", str(longest), "-t", str(threads), "-tb", str(threads), "-np", "1", "--no-webui"]
        self.ports: dict[tuple[str | None, int], int] = {}

    def _port(self, draft: str | None, drafted: int) -> int:
        if (draft, drafted) not in self.ports:
            more = []
            if draft is not None:
                more = ["-md", self.drafts[draft], "--spec-type", "draft-simple", "--spec-draft-n-max", str(drafted)]
            self.ports[draft, drafted] = _serve([self.binary, *self.common, *more])
        return self.ports[draft, drafted]

    def decode(self, prompt: list[int], new_tokens: int, draft: str | None, drafted: int) -> Decoded:
        order = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        order |= {"return_tokens": True, "samplers": ["top_k"], "top_k": 1}
        address = f"http://127.0.0.1:{self._port(draft, drafted)}/completion"
        request = urllib.request.Request(address, json.dumps(order).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            done = json.load(reply)
        tokens, timings = done["tokens"], done["timings"]
        proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return Decoded(tokens, proposed, accepted, len(tokens) - 1 - accepted if draft else 0)


def _serve(command: list[str]) -> int:
    """Start a server on a free port and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=sys.stderr)
    atexit.register(server.terminate)
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return port
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server ended with exit code {server.returncode}")


ENGINES = {
    "draftsmith": Draftsmith,
    "openvino-genai": OpenVino,
    "llama-cpp-python": LlamaCppPython,
    "llama-server": LlamaServer,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to the log
    engine = ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))
    answers.write(json.dumps({"version": engine.version}) + "\n")
    for line in sys.stdin:
        started = time.perf_counter()
        done = engine.decode(**json.loads(line))
        answers.write(json.dumps({"seconds": time.perf_counter() - started, **vars(done)}) + "\n")


if __name__ == "__main__":
    main()
