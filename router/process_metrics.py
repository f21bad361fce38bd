"""One ``/metrics`` for several router processes: whichever is asked asks the others and names each sample's process."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ANSWER_TIMEOUT_S = 1.0
_MAX_BYTES = 64 * 1024 * 1024
LABEL = "router_process"


class SharedMetrics:
    """This process's figures on a socket of its own in ``folder``, and everybody's on request."""

    def __init__(self, registry: CollectorRegistry, folder: Path, index: int, count: int) -> None:
        self._registry = registry
        self._folder = folder
        self._index = index
        self._count = count
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)

    async def page(self) -> bytes:
        """All processes' figures; one that does not answer at once is left out."""
        others = [index for index in range(self._count) if index != self._index]
        texts = dict(zip(others, await asyncio.gather(*(self._ask(index) for index in others)), strict=True))
        texts[self._index] = generate_latest(self._registry)
        merged = CollectorRegistry()
        merged.register(_Merged({index: text.decode() for index, text in sorted(texts.items()) if text is not None}))
        return generate_latest(merged)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.sock"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(generate_latest(self._registry))
            await writer.drain()
        writer.close()

    async def _ask(self, index: int) -> bytes | None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index), limit=_MAX_BYTES)
                try:
                    return await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None


class _Merged(Collector):
    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for index, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.get(family.name)
                if merged is None:
                    merged = families[family.name] = Metric(family.name, family.documentation, family.type)
                merged.samples.extend(_labelled(family, index))
        return families.values()


def _labelled(family: Metric, index: int) -> Iterator[Sample]:
    for sample in family.samples:
        yield sample._replace(labels={**sample.labels, LABEL: str(index)})
