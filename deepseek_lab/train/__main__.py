"""Train a model: see `python -m deepseek_lab.train --help`, and the README for launching on several ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from deepseek_lab.train import config, run

USAGE = """\
usage: python -m deepseek_lab.train [--config FILE] [--out DIR] [--resume] [--mine] [--KEY VALUE ...]

  --config FILE   settings in YAML, such as configs/tiny.yaml; without it, the defaults below
  --out DIR       where the run is written (default: runs/latest)
  --resume        go on from the newest good checkpoint in DIR
  --mine          run on the functions that you wrote and checked in the notebooks
  --KEY VALUE     any setting, by its dotted name

On several ranks: accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train ...

Settings and their defaults:"""


def main(argv: list[str] | None = None) -> int:
    """Read the command line, train, return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print(USAGE)
        for key, value in flatten(config.RunConfig().to_dict()).items():
            print(f"  --{key} {'null' if value is None else value}")
        print("  --model.preset NAME   one of the presets of deepseek_lab.model, whose fields the other keys replace")
        return 0
    try:
        options, overrides = parse(arguments)
        settings = config.load(options.get("config"), overrides)
    except config.ConfigError as error:
        return run.refuse(error)
    out = Path(options.get("out", "runs/latest"))
    return run.run(settings, out, resume="resume" in options, mine="mine" in options)


def parse(arguments: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the command line into the options above and overrides by dotted key."""
    options: dict[str, str] = {}
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("--"):
            raise config.ConfigError(f"{word!r} stands where a --KEY was expected; see --help")
        key, has_value, value = word[2:].partition("=")
        if key in ("resume", "mine"):
            options[key] = ""
            continue
        if not has_value:
            value = next(words, "")
            if not value or value.startswith("--"):
                raise config.ConfigError(f"--{key} needs a value")
        (options if key in ("config", "out") else overrides)[key] = value
    return options, overrides


def flatten(values: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings by their dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


if __name__ == "__main__":
    sys.exit(main())
