"""Reading ``{"name": ..., "arguments": {...}}`` character by character, as a model writes it."""

import enum
import json

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class _State(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NEXT = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class _Value:
    """Finds the end of one JSON value; does not check what is inside."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_object(self) -> bool:
        return bool(self.text) and self.text[0] == "{"

    def push(self, char: str) -> bool:
        """Whether ``char`` belongs to the value. One that is no scalar says itself when it is over (``is_over``)."""
        scalar = bool(self.text) and self.text[0] not in '{["'
        if scalar and char in ",}] \t\r\n":
            return False
        self.text.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return True

    @property
    def is_over(self) -> bool:
        return bool(self.text) and self.text[0] in '{["' and not self._in_string and self._depth <= 0


class CallReader:
    """One call's object. ``name`` and whatever of its arguments is certain are there as soon as they are read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw: list[str] = []
        self._state = _State.START
        self._key = ""
        self._value = _Value()
        self._fragments: list[str] = []
        self._has_arguments = False
        self._closes_itself = False

    @classmethod
    def of(cls, name: str) -> "CallReader":
        """A reader of the arguments alone, of a call whose name is known."""
        reader = cls()
        reader.name = name
        reader._key = _ARGUMENTS[0]
        reader._state = _State.VALUE
        reader._closes_itself = True
        return reader

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def is_failed(self) -> bool:
        """What was read is no such object."""
        return self._state is _State.FAILED

    def push(self, char: str) -> None:
        """One more character; not to be called once done or failed."""
        self.raw.append(char)
        self._step(char)

    def take_arguments(self) -> str:
        """The arguments' JSON text read since the last call."""
        text = "".join(self._fragments)
        self._fragments.clear()
        return text

    def _step(self, char: str) -> None:
        state = self._state
        if state is _State.VALUE or (state is _State.KEY and self._value.text):
            self._in_value(char, state)
        elif char in _SPACE:
            return
        elif state is _State.START and char == "{":
            self._state = _State.KEY
        elif state is _State.KEY and char == '"':
            self._value.push(char)
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.NEXT and char == ",":
            self._state = _State.KEY
        elif state in (_State.NEXT, _State.KEY) and char == "}":
            self._finish()
        else:
            self._state = _State.FAILED

    def _in_value(self, char: str, state: _State) -> None:
        value = self._value
        if not value.text and char in _SPACE:
            return
        if not value.text and char in ",}]:":
            self._state = _State.FAILED
            return
        belongs = value.push(char)
        if belongs and state is _State.VALUE and self._key in _ARGUMENTS and value.is_object:
            self._fragments.append(char)
        if belongs and not value.is_over:
            return
        self._value = _Value()
        if state is _State.KEY:
            self._key = _string("".join(value.text)) or ""
            self._state = _State.COLON
            return
        self._state = _State.NEXT
        self._take(value)
        if self._closes_itself:
            self._state = _State.DONE
        elif not belongs:
            self._step(char)

    def _take(self, value: _Value) -> None:
        """A value is complete."""
        text = "".join(value.text)
        if self._key == "name":
            self.name = _string(text)
            if self.name is None:
                self._state = _State.FAILED
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            if not value.is_object:  # some models write the object as a string
                self._fragments.append(_string(text) or text)

    def _finish(self) -> None:
        if self.name is None:
            self._state = _State.FAILED
            return
        if not self._has_arguments:
            self._fragments.append("{}")
        self._state = _State.DONE


def _string(text: str) -> str | None:
    """The string that is JSON text ``text``; ``None`` where it is no string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
