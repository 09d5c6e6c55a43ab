"""
Time to import a trainer of this package, beside that of TRL's.

    python docs/bench/import_cost.py
    python docs/bench/import_cost.py --names DPOConfig,DPOTrainer --repeat 20

Each import runs in a new process, and the two packages take turns. CPU time (user and system) is measured, because
other work on the machine changes it less than elapsed time. All modules are compiled before, as in an installed
package.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys


def seconds(package: str, names: str) -> float:
    """CPU seconds of a fresh process that imports names from a package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"from {package} import {names}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="DPOTrainer", help="names that both packages have")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    packages = ("trl", "trl_padfix")
    for package in packages:
        seconds(package, options.names)  # compiles modules and fills the cache of the disk
    measured: dict[str, list[float]] = {package: [] for package in packages}
    for i in range(options.repeat):
        for package in packages[:: 1 if i % 2 else -1]:
            measured[package].append(seconds(package, options.names))
    theirs, ours = (statistics.median(measured[package]) for package in packages)
    for package, values in measured.items():
        print(f"{package}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    print(f"{options.names}: {ours / theirs - 1:+.1%} of TRL's import, medians of {options.repeat}")


if __name__ == "__main__":
    main()
