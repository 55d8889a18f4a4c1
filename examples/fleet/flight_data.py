"""Reads a file of flights row by row, and judges each: a flight that can be logged, or rejected for a reason."""

import csv
import enum
import gzip
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path

from attrs import define, field, frozen

__all__ = [
    "COLUMNS",
    "Flight",
    "FlightDataError",
    "FlightSurvey",
    "Reason",
    "RejectedRow",
    "read_flights",
    "read_rows",
    "survey_flights",
]

YEAR = 2013
"""The files have no column for it."""

MISSING = "NA"

COLUMNS = (
    "month",
    "day",
    "dep_time",
    "arr_time",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
)

# Column -> the least and the greatest number, and whether the number may be missing.
_NUMBERS = {
    "month": (1, 12, False),
    "day": (1, 31, False),
    "dep_time": (0, 2400, True),
    "arr_time": (0, 2400, True),
    "flight": (1, 99_999, False),
    "air_time": (1, 1_440, True),
    "distance": (1, 99_999, False),
}
_CODES = ("carrier", "tailnum", "origin", "dest")
_CODE = re.compile(r"[0-9A-Za-z]{1,10}")
_DIGITS = re.compile(r"[0-9]{1,5}")


class FlightDataError(Exception):
    """A file is not what it should be; nothing of it is used.

    Attributes:
        path: the file.
        problem: what is wrong.
        line: where, counted from 1; `None` where no line can be named.
    """

    def __init__(self, path: Path, problem: str, line: int | None = None) -> None:
        super().__init__(f"{path}: {problem}" if line is None else f"{path}, line {line}: {problem}")
        self.path = path
        self.problem = problem
        self.line = line


class Reason(enum.Enum):
    """Why a row is rejected; of several the first counts."""

    NO_TAIL_NUMBER = "no tail number"
    NEVER_LEFT = "never left"
    NO_AIR_TIME = "no air time"
    REPEATED = "repeats an earlier row"
    """The same flight of the same aircraft: its request ID is taken."""


@frozen
class Flight:
    """A row that can be logged."""

    line: int
    tail: str
    carrier: str
    origin: str
    minutes: int
    request_id: str


@frozen
class RejectedRow:
    """A row that cannot be logged."""

    line: int
    text: str
    reason: Reason


@define
class FlightSurvey:
    """What is in a file, counted."""

    flights: int = 0
    aircraft: set[str] = field(factory=set)
    rejected: Counter[Reason] = field(factory=Counter)

    @property
    def rows(self) -> int:
        """All rows."""
        return self.flights + self.rejected.total()


def survey_flights(path: Path) -> FlightSurvey:
    """Read a whole file, check each row, and count.

    Raises:
        FlightDataError: as for `read_rows`.
    """
    survey = FlightSurvey()
    for row in read_rows(path):
        if isinstance(row, Flight):
            survey.flights += 1
            survey.aircraft.add(row.tail)
        else:
            survey.rejected[row.reason] += 1
    return survey


def read_flights(path: Path) -> Generator[Flight, None, None]:
    """Yield the flights of a file, in order.

    Raises:
        FlightDataError: as for `read_rows`.
    """
    return (row for row in read_rows(path) if isinstance(row, Flight))


def read_rows(path: Path) -> Generator[Flight | RejectedRow, None, None]:
    """Yield the rows of a gzip-compressed CSV file, in order. None is kept, however long the file is.

    Raises:
        FlightDataError: it cannot be read, is cut off, or is no such file.
    """
    with closing(_Seen()) as seen:
        for line, row in _rows(path):
            request_id = _request_id(row)
            reason = _reason(row)
            if reason is None and not seen.add(row["tailnum"], request_id):
                reason = Reason.REPEATED
            if reason is None:
                minutes = int(row["air_time"])
                yield Flight(line, row["tailnum"], row["carrier"], row["origin"], minutes, request_id)
            else:
                yield RejectedRow(line, ",".join(row.values()), reason)


class _Seen:
    """A set of flights on the disk, in a file without a name that ends with it."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("CREATE TABLE seen (tail TEXT, request_id TEXT, PRIMARY KEY (tail, request_id))")

    def add(self, tail: str, request_id: str) -> bool:
        """Add a flight, and say whether it is new."""
        added = self._connection.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (tail, request_id))
        return added.rowcount == 1

    def close(self) -> None:
        """Forget them."""
        self._connection.close()


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the fields of each row, checked."""
    line = 0
    last = ""

    def lines(text: Iterable[str]) -> Iterator[str]:
        nonlocal last
        for line_text in text:
            last = line_text
            yield line_text

    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as text:
            reader = csv.reader(lines(text), strict=True)
            header = next(reader, None)
            if header is None:
                raise FlightDataError(path, "the file is empty")
            line = reader.line_num
            if tuple(header) != COLUMNS:
                raise FlightDataError(
                    path, f"the columns must be {','.join(COLUMNS)}, not {_shown(','.join(header))}", line
                )
            for fields in reader:
                line = reader.line_num
                if len(fields) != len(COLUMNS):
                    raise FlightDataError(path, f"the row has {len(fields)} fields, not {len(COLUMNS)}", line)
                row = dict(zip(COLUMNS, fields, strict=True))
                problem = _problem(row)
                if problem is not None:
                    raise FlightDataError(path, problem, line)
                yield line, row
            if line == 1:
                raise FlightDataError(path, "there is no row below the columns", line)
            if not last.endswith("\n"):
                raise FlightDataError(path, "the last line has no end: the file is cut off", line)
    except EOFError:
        raise FlightDataError(path, "the compressed data is cut off after this line", line) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        if line == 0:
            raise FlightDataError(path, f"this is no gzip file: {error}") from None
        raise FlightDataError(path, f"the compressed data is damaged after this line: {error}", line) from None
    except UnicodeDecodeError:
        raise FlightDataError(path, "what follows is no UTF-8 text", line) from None
    except csv.Error as error:
        raise FlightDataError(path, f"this is no CSV: {error}", line + 1) from None
    except OSError as error:
        raise FlightDataError(path, f"cannot be read: {error.strerror or error}") from None


def _problem(row: dict[str, str]) -> str | None:
    """Say what is wrong with a row that is more than dirty: its file is another one, or broken."""
    for column, (least, most, may_miss) in _NUMBERS.items():
        value = row[column]
        if may_miss and value == MISSING:
            continue
        if not _DIGITS.fullmatch(value) or not least <= int(value) <= most:
            missing = f" or {MISSING}" if may_miss else ""
            return f"{column} must be a number from {least} to {most}{missing}, not {_shown(value)}"
    for column in _CODES:
        if not _CODE.fullmatch(row[column]):
            return f"{column} must be 1 to 10 letters and digits, not {_shown(row[column])}"
    try:
        _date(row)
    except ValueError:
        return f"there is no day {row['day']} in month {row['month']} of {YEAR}"
    return None


def _reason(row: dict[str, str]) -> Reason | None:
    if row["tailnum"] == MISSING:
        return Reason.NO_TAIL_NUMBER
    if row["dep_time"] == MISSING:
        return Reason.NEVER_LEFT
    if row["air_time"] == MISSING:
        return Reason.NO_AIR_TIME
    return None


def _request_id(row: dict[str, str]) -> str:
    return f"{row['carrier']}-{int(row['flight'])}-{_date(row)}-{row['origin']}"


def _date(row: dict[str, str]) -> date:
    return date(YEAR, int(row["month"]), int(row["day"]))


def _shown(value: str) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
