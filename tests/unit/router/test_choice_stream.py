"""One choice: text, counts, logprobs entries and endings."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.protocol.ids import Attempt, ChoiceIndex, RequestId
from twopool.protocol.messages import FinishReason, TokenDelta, TokenLogprobs
from twopool.router.choice_stream import ChoiceStream, TextOptions, TokenEntry
from twopool.router.detokenizer import TokenTable
from twopool_testing.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TABLE = TokenTable(TOKENIZER)
END = 2


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def delta(
    ids: Sequence[int], finish: FinishReason | None = None, stop_token_id: int | None = None, *, logprobs: bool = False
) -> TokenDelta:
    entries = tuple(TokenLogprobs(-0.5, (token_id,), (-0.5,)) for token_id in ids) if logprobs else None
    return TokenDelta(
        RequestId("r"), Attempt(0), ChoiceIndex(0), 0, tuple(ids), finish, stop_token_id, logprobs=entries
    )


def play(
    ids: list[int], options: TextOptions, finish: FinishReason | None = "length"
) -> tuple[list[str], ChoiceStream]:
    """Push one id after the other; the texts as a stream would send them."""
    choice = ChoiceStream(TABLE, options)
    texts = []
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        choice.push(delta([token_id], "length" if last else None, logprobs=options.logprobs))
        texts.append(choice.take_text())
        if choice.finish_reason is not None:
            break
    return texts, choice


def test_a_stop_string_inside_a_token_cuts_exactly() -> None:
    """API-02: the token in which the match completed counts, the text ends before the stop string."""
    ids = ids_of("abc") + ids_of("Hello")
    assert TABLE.token_text(ids[-1]) == "Hello"
    texts, choice = play(ids, TextOptions(stops=("el",)))
    assert "".join(texts) == "abcH"
    assert (choice.finish_reason, choice.stop_reason, choice.num_tokens) == ("stop", "el", len(ids))


def test_a_stop_string_over_tokens_never_shows_a_prefix() -> None:
    texts, choice = play([*ids_of("Hello"), *ids_of(" world"), *ids_of("!")], TextOptions(stops=("lo world",)))
    assert "".join(texts) == "Hel"
    assert choice.num_tokens == 3


def test_tokens_after_a_stop_in_one_delta_do_not_count() -> None:
    choice = ChoiceStream(TABLE, TextOptions(stops=("b",)))
    assert choice.push(delta([*ids_of("a"), *ids_of("b"), *ids_of("c")])) is True
    assert (choice.take_text(), choice.num_tokens) == ("a", 2)
    assert choice.push(delta(ids_of("d"))) is False
    assert (choice.take_text(), choice.num_tokens) == ("", 2)


def test_a_stop_string_wins_over_the_length_it_coincides_with() -> None:
    choice = ChoiceStream(TABLE, TextOptions(stops=("b",)))
    assert choice.push(delta([*ids_of("a"), *ids_of("b")], "length")) is False
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "b")


def test_held_text_is_shown_when_the_choice_ends_without_a_match() -> None:
    texts, choice = play([*ids_of("a"), *ids_of("b")], TextOptions(stops=("bc",)))
    assert texts == ["a", "b"]
    assert choice.finish_reason == "length"


def test_include_stop() -> None:
    texts, _ = play(ids_of("abc Hello"), TextOptions(stops=("el",), include_stop=True))
    assert "".join(texts) == "abc Hel"


def test_min_tokens_keeps_stop_strings_from_matching() -> None:
    texts, choice = play([*ids_of("a"), *ids_of("b"), *ids_of("b")], TextOptions(stops=("b",), min_tokens=2))
    assert "".join(texts) == "ab"
    assert choice.num_tokens == 3


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_token_counts_but_is_not_shown(skip: bool) -> None:
    choice = ChoiceStream(TABLE, TextOptions(skip_special_tokens=skip, logprobs=True))
    choice.push(delta([*ids_of("a"), END], "stop", END, logprobs=True))
    assert (choice.take_text(), choice.num_tokens, choice.stop_reason) == ("a", 2, None)
    assert [entry.piece for entry in choice.take_entries()] == [b"a", b""]


def test_the_end_token_is_shown_when_stops_are_included() -> None:
    choice = ChoiceStream(TABLE, TextOptions(skip_special_tokens=False, include_stop=True))
    choice.push(delta([*ids_of("a"), END], "stop", END))
    assert choice.take_text() == "a<|im_end|>"


def test_a_clients_stop_token_is_named() -> None:
    [token_id] = ids_of("b")
    choice = ChoiceStream(TABLE, TextOptions(stop_token_ids=(token_id,)))
    choice.push(delta([*ids_of("a"), token_id], "stop", token_id))
    assert (choice.take_text(), choice.stop_reason) == ("a", token_id)


def test_token_id_zero_as_stop_token_is_hidden() -> None:
    choice = ChoiceStream(TABLE, TextOptions(skip_special_tokens=False, stop_token_ids=(0,)))
    choice.push(delta([*ids_of("a"), 0], "stop", 0))
    assert (choice.take_text(), choice.stop_reason) == ("a", 0)


def test_an_ending_without_a_token() -> None:
    choice = ChoiceStream(TABLE, TextOptions())
    choice.push(delta(ids_of("a")))
    choice.push(delta([], "length"))
    assert (choice.take_text(), choice.num_tokens, choice.finish_reason) == ("a", 1, "length")


def test_a_character_cut_off_by_the_length_ends_as_decode_does() -> None:
    """API-06."""
    ids = ids_of("🙂")[:1]
    texts, _ = play(ids, TextOptions())
    assert "".join(texts) == TOKENIZER.decode(ids) == "\ufffd"


def test_an_echoed_prompt_comes_first_and_shifts_offsets() -> None:
    choice = ChoiceStream(TABLE, TextOptions(logprobs=True), prefix="prompt ")
    choice.push(delta(ids_of("a"), "length", logprobs=True))
    assert choice.take_text() == "prompt a"
    assert [entry.offset for entry in choice.take_entries()] == [7]


@settings(deadline=None)
@given(
    text=st.text(alphabet="abHelo 🙂é日", max_size=20),
    stops=st.sampled_from([(), ("lo",), ("🙂",), ("é日", "b"), ("o 🙂",)]),
)
def test_entries_always_add_up_to_the_text(text: str, stops: tuple[str, ...]) -> None:
    """X-logprobs-chat-shape: one entry a token, bytes that join to the text, whatever was cut; each one's offset is
    that of the character its first byte belongs to.
    """
    ids = ids_of(text + "a")
    choice = ChoiceStream(TABLE, TextOptions(stops=stops, logprobs=True))
    shown = ""
    entries: list[TokenEntry] = []
    for position, token_id in enumerate(ids):
        choice.push(delta([token_id], "length" if position == len(ids) - 1 else None, logprobs=True))
        shown += choice.take_text()
        entries += choice.take_entries()
        assert len(b"".join(entry.piece for entry in entries)) <= len(shown.encode())
    assert b"".join(entry.piece for entry in entries).decode() == shown
    assert len(entries) == choice.num_tokens
    before = b""
    for entry in entries:
        assert entry.offset == len(before.decode(errors="ignore"))
        before += entry.piece
