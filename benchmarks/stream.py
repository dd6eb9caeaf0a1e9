"""Measure: the memory that 100 MB take on their way from a streaming tool into a stored output."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Report, run_python
from benchmarks.memory import resident

PIECES, LINE = 1_600, 1_024
PIECE_BYTES = 64 * LINE


async def measure() -> Report:
    figures = json.loads(run_python("-m", "benchmarks.stream", str(PIECES)))
    report = Report(f"{PIECES * PIECE_BYTES / 1e6:.0f} MB streamed by a tool into a handle")
    report.figure("extra memory at the peak", figures["extra"] / 1e6, "MB", must=20.0)
    report.figure("time", figures["seconds"] * 1000, "ms")
    report.figure("writing the same to a file, plainly", figures["plain"] * 1000, "ms")
    return report


async def main(pieces: int) -> None:
    """What runs in the fresh interpreter: streams, measures, and reads everything back."""
    from toolspace import Settings, Toolspace, tool
    from toolspace.storage.disk_outputs import DiskOutputs

    sent_digest = hashlib.blake2b()

    @tool
    async def flood(count: int) -> AsyncIterator[str]:
        """Yield text, 64 KiB at a time."""
        for number in range(count):
            piece = f"{number:0{LINE - 1}d}\n" * (PIECE_BYTES // LINE)
            sent_digest.update(piece.encode())
            yield piece

    with tempfile.TemporaryDirectory() as folder:
        outputs = DiskOutputs(Path(folder) / "outputs", ttl=3600.0)
        # As for a model: without this limit, a program gets up to 64 MB whole.
        settings = Settings(state_dir=Path(folder), max_inline_bytes=100_000)
        async with Toolspace([flood], settings=settings, outputs=outputs) as ts:
            await ts.call("flood", {"count": 4})  # Loads what is loaded on first use.
            sent_digest = hashlib.blake2b()
            idle = resident()
            started_at = perf_counter()
            result = await ts.call("flood", {"count": pieces})
            seconds = perf_counter() - started_at
            extra = resident("VmHWM") - idle
            handle = result.unwrap()["tool_output"]
            output = await outputs.find(handle["handle"], session=ts.orchestrator.session, owner=None)
            assert output is not None, "the handle leads nowhere"
            stored_digest = hashlib.blake2b()
            async for lines in outputs.lines(output):
                stored_digest.update("".join(f"{line}\n" for line in lines).encode())
            if handle["bytes"] != pieces * PIECE_BYTES or stored_digest.digest() != sent_digest.digest():
                raise RuntimeError(f"the stored output is not what was sent: {handle['bytes']} bytes")
        plain = _write_file(Path(folder) / "plain", pieces)
    print(json.dumps({"extra": extra, "seconds": seconds, "plain": plain}))


def _write_file(path: Path, pieces: int) -> float:
    started_at = perf_counter()
    digest = hashlib.blake2b()
    with path.open("w") as file:
        for number in range(pieces):
            piece = f"{number:0{LINE - 1}d}\n" * (PIECE_BYTES // LINE)
            digest.update(piece.encode())
            file.write(piece)
    return perf_counter() - started_at


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
