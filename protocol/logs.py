"""Structured logs on stderr: every line carries what its caller passed as ``extra`` (request id, worker id, ...)."""

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(*, process: str, level: str, style: str) -> None:
    """Configure the root logger. ``process`` names this process in each line; ``style`` is ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as ``extra``, in order."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """``time level process logger: message key=value ...``; line breaks in values cannot forge lines."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname:7} {self._process} {record.name}: "
        fields = "".join(f" {key}={value}" for key, value in extra_fields(record).items())
        line = (head + record.getMessage() + fields).replace("\r", "\\r").replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
