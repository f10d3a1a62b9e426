"""A script: load an export with transformers alone, and write down what it computes. Nothing of Draftsmith is imported.

Run as ``python -P stock_reader.py JOB``. The job (JSON) names folders, texts and prompts; the answers go to a file that
torch reads: logits of the target and of every form of the draft, greedy answers with and without its help, and what it
proposed for them.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging


@torch.inference_mode()
def logits(model, texts):
    """Logits (positions, vocabulary) that predict the ids ``first`` … ``first + count − 1`` of each text."""
    found = []
    for text in texts:
        all_of_it = model(input_ids=torch.tensor([text["ids"]]), use_cache=False).logits[0]
        found.append(all_of_it[text["first"] - 1 : text["first"] - 1 + text["count"]])
    return torch.cat(found)


@torch.inference_mode()
def greedy(target, prompts, new_tokens, assistant=None, draft_tokens=0):
    """Greedy answers, by transformers' assisted generation where an assistant is given, and by answer the ids proposed in each
    round: those that the target was given after what it had written."""
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    config.eos_token_id = target.generation_config.eos_token_id
    options = {} if assistant is None else {"assistant_model": assistant}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    answers, proposals = [], []
    given = []
    hook = target.register_forward_pre_hook(lambda _, __, named: given.append(named["input_ids"][0].tolist()), with_kwargs=True)
    for prompt in prompts:
        given.clear()
        ids = torch.tensor([prompt])
        answer = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)
        answers.append(answer[0, len(prompt) :].tolist())
        # Each round it reads its last token and the proposals, in the first one the whole prompt.
        proposals.append([block[len(prompt) if number == 0 else 1 :] for number, block in enumerate(given)])
    hook.remove()
    return answers, proposals


def load(folder, **options):
    """A float32 model in eval mode, and the names of weights that the files lack or that it has no place for."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **options
    )
    return model.eval(), sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]))


def answer(job):
    """All answers to a job, by form of the draft."""
    target, _ = load(job["target"])
    plain, _ = greedy(target, job["prompts"], job["new_tokens"])
    answers = {"target": logits(target, job["texts"]), "plain": plain, "forms": {}}
    for name, options in job["forms"].items():
        draft, misplaced = load(job["draft"], **options)
        assisted, proposals = greedy(target, job["prompts"], job["new_tokens"], draft, job["draft_tokens"])
        answers["forms"][name] = {
            "logits": logits(draft, job["texts"]),
            "misplaced": misplaced,
            "assisted": assisted,
            "proposals": proposals,
        }
    return answers


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.save(answer(order), order["answers"])
