"""Log lines are structured and cannot be forged."""

import json
import logging

from twopool.protocol.logs import JsonFormatter, TextFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": message})
    vars(made).update(extra)
    return made


def test_json_lines_carry_the_request_id() -> None:
    line = json.loads(JsonFormatter("router").format(record("hello", request_id="req-1")))
    assert (line["message"], line["request_id"], line["process"]) == ("hello", "req-1", "router")


def test_text_lines_stay_one_line() -> None:
    line = TextFormatter("router").format(record("a\nb", request_id="x\r\nforged"))
    assert "\n" not in line and "\r" not in line
    assert "request_id=x" in line
