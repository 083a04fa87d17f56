"""The command line: python -m benchmarks NAME [options]."""

from __future__ import annotations

import argparse
import sys

from benchmarks import cold, compare, cpu, first, gpu, memory, report, scale, shuffle, slow, train, warm

PROGRAMS = {
    "warm": warm,
    "cold": cold,
    "slow": slow,
    "first": first,
    "train": train,
    "memory": memory,
    "scale": scale,
    "cpu": cpu,
    "gpu": gpu,
    "shuffle": shuffle,
    "report": report,
    "compare": compare,
}

# Not in `all`: what measures nothing, and what no machine changes; shuffle takes an hour.
APART = ("report", "compare", "shuffle")
SIZED = ("warm", "cold", "slow", "first", "memory", "cpu", "gpu")  # programs with the option --gib


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="program", required=True)
    for name, module in PROGRAMS.items():
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
    everything = commands.add_parser("all", help="Run every program that times, with its defaults.")
    everything.add_argument("--gib", help="size of the token files (default: each program's own)")
    everything.set_defaults(program="all")
    options = parser.parse_args(arguments)
    if options.program == "all":
        sized = [] if options.gib is None else ["--gib", options.gib]
        for name in PROGRAMS:
            if name not in APART:
                main([name, *(sized if name in SIZED else [])])
    else:
        PROGRAMS[options.program].run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
