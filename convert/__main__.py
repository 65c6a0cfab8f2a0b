"""python -m jhybrid.convert SRC DST: a Hugging Face checkpoint -> a jhybrid checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from jhybrid.command import run_on_host
from jhybrid.params import count_bytes

from .conversion import open_checkpoint
from .verify import verify
from .writer import check_destination, write_checkpoint


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jhybrid.convert", description=__doc__)
    out.add_argument("src", type=Path, metavar="SRC", help="Hugging Face checkpoint folder")
    out.add_argument("dst", type=Path, metavar="DST", help="folder to write; must not exist")
    out.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of the weights (default: as in SRC); norms and decays are float32",
    )
    out.add_argument(
        "--verify", action="store_true", help="compare float32 logits with transformers (torch)"
    )
    out.add_argument(
        "--overwrite", action="store_true", help="replace a converted checkpoint at DST"
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """0 when DST is written; 2 with one message on stderr when the input does not allow it."""
    return run_on_host(_convert, parser().parse_args(argv))


def _convert(args: argparse.Namespace) -> None:
    if args.verify and importlib.util.find_spec("torch") is None:
        raise ValueError("--verify: needs torch, which is not installed: pip install torch")
    check_destination(args.src, args.dst, overwrite=args.overwrite)
    conversion = open_checkpoint(args.src, args.dtype)
    total = count_bytes(conversion.specs, conversion.dtype)

    def check(written: Path) -> None:
        difference, scale = verify(args.src, written)
        print(
            f"verified: max abs logit difference {difference:.3g}, largest logit {scale:.3g}",
            file=sys.stderr,
        )

    with tqdm(total=total, unit="B", unit_scale=True, desc="convert", file=sys.stderr) as bar:
        manifest = write_checkpoint(
            conversion,
            args.dst,
            overwrite=args.overwrite,
            progress=lambda _, size: bar.update(size),
            before_rename=check if args.verify else None,
        )
    count, size = manifest["parameters"], manifest["bytes"]
    print(f"{args.dst}: {count:,} parameters, {size:,} bytes, {manifest['dtype']}")


if __name__ == "__main__":
    sys.exit(main())
