"""python -m deepseek_lab <doctor|generate|export|progress>"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from deepseek_lab import doctor


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepseek_lab", description="deepseek_lab's tools")
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("doctor", help="can this machine run the course? if not, what to do")

    command = commands.add_parser("generate", help="continue a prompt with a trained model, as text streams out")
    command.add_argument("--run", type=Path, help="folder of a run (default: the model that ships with the package)")
    command.add_argument("--prompt", required=True)
    command.add_argument("--max-new-tokens", type=int, default=200)
    command.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    command.add_argument("--top-k", type=int, default=0, help="0: all")
    command.add_argument("--top-p", type=float, default=0.95)
    command.add_argument("--seed", type=int, default=0)

    command = commands.add_parser("export", help="write a run's model and tokenizer for transformers")
    command.add_argument("--run", type=Path, required=True, help="folder of a run")
    command.add_argument("--to", type=Path, required=True, help="folder to write")
    command.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="type of the stored weights")

    commands.add_parser("progress", help="which exercises are solved")

    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return doctor.main([])
    if arguments.command == "progress":
        from deepseek_lab.learn import progress  # starts the ranks' forkserver, which the others do not need

        print(progress())
        return 0
    try:
        return generate(arguments) if arguments.command == "generate" else export(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def generate(arguments: argparse.Namespace) -> int:
    """Stream a continuation of the prompt to standard output."""
    from deepseek_lab.model.generate import stream
    from deepseek_lab.train.restore import load_model

    model, tokenizer = load_model(arguments.run)
    ids = tokenizer.encode(arguments.prompt) or [tokenizer.eot_id]
    new = stream(
        model,
        ids,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        eos_id=tokenizer.eot_id,
    )
    print(arguments.prompt, end="", flush=True)
    for text in pieces(tokenizer, new):
        print(text, end="", flush=True)
    print()
    return 0


def pieces(tokenizer, ids: Iterable[int]) -> Iterable[str]:
    """Text as soon as it is complete: a token may end in the middle of a character."""
    held: list[int] = []
    for token in ids:
        held.append(token)
        text = tokenizer.decode(held)
        if not text.endswith("�"):
            yield text
            held = []
    if held:
        yield tokenizer.decode(held)


def export(arguments: argparse.Namespace) -> int:
    """Write a folder that `transformers` loads, tokenizer included."""
    from deepseek_lab.train.restore import export_run

    export_run(arguments.run, arguments.to, arguments.dtype)
    print(f"written to {arguments.to}: AutoModelForCausalLM.from_pretrained({str(arguments.to)!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
