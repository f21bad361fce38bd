"""docs/api.md names every field that requests may have, on the right side of the line."""

import re
from pathlib import Path

from twopool.router.schema import ChatBody, CompletionBody, _Unsupported

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


def test_every_field_is_documented_and_no_other() -> None:
    supported, _, rest = TEXT.partition("### Supported")[2].partition("### Not supported")
    first_columns = re.findall(r"^\|([^|]*)\|", supported, re.MULTILINE)
    named = {name for column in first_columns for name in re.findall(r"`(\w+)`", column)}
    refused = set(re.findall(r"`(\w+)`", rest.partition("## Text")[0]))
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    unsupported = set(_Unsupported.__struct_fields__)
    assert refused == unsupported
    assert named == fields - unsupported
