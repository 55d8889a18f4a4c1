import gzip
from pathlib import Path

import pytest

import flight_data
from flight_data import COLUMNS, Flight, FlightDataError, Reason, RejectedRow, read_flights, read_rows, survey_flights

HEADER = ",".join(COLUMNS)
GOOD = "1,1,517,830,UA,1545,N14228,EWR,IAH,227,1400"
JANUARY = Path(flight_data.__file__).with_name("data") / "flights-2013-01.csv.gz"


def written(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "flights.csv.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in (header, *rows)).encode()))
    return path


def row(**changed: str) -> str:
    return ",".join((dict(zip(COLUMNS, GOOD.split(","), strict=True)) | changed).values())


def problem_of(path: Path) -> FlightDataError:
    with pytest.raises(FlightDataError) as caught:
        survey_flights(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_good_row_is_a_flight(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert list(read_rows(path)) == [Flight(2, "N14228", "UA", "EWR", 227, "UA-1545-2013-01-01-EWR")]
    assert list(read_flights(path)) == list(read_rows(path))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlightDataError, match="line 1: there is no row below the columns"):
        survey_flights(written(tmp_path))


def test_a_last_line_without_its_end_is_a_cut(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-3]))
    with pytest.raises(FlightDataError, match="line 2: the last line has no end: the file is cut off"):
        survey_flights(path)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (("tailnum",), Reason.NO_TAIL_NUMBER),
        (("dep_time",), Reason.NEVER_LEFT),
        (("air_time",), Reason.NO_AIR_TIME),
        (("tailnum", "dep_time", "air_time"), Reason.NO_TAIL_NUMBER),
        (("tailnum", "air_time"), Reason.NO_TAIL_NUMBER),
        (("dep_time", "air_time"), Reason.NEVER_LEFT),
    ],
)
def test_a_dirty_row_is_rejected_for_the_first_reason(tmp_path: Path, missing: tuple[str, ...], reason: Reason) -> None:
    dirty = row(flight="1", **dict.fromkeys(missing, "NA"))
    path = written(tmp_path, GOOD, dirty, row(flight="2"))
    assert [each for each in read_rows(path) if isinstance(each, RejectedRow)] == [RejectedRow(3, dirty, reason)]
    assert [flight.line for flight in read_flights(path)] == [2, 4]


def test_an_unknown_arrival_is_no_reason(tmp_path: Path) -> None:
    assert len(list(read_flights(written(tmp_path, row(arr_time="NA"))))) == 1


def test_a_repeated_flight_is_rejected_and_another_aircraft_or_day_is_not(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, row(air_time="1"), row(tailnum="N2"), row(day="2"))
    rejected = [each for each in read_rows(path) if isinstance(each, RejectedRow)]
    assert [(each.line, each.reason) for each in rejected] == [(3, Reason.REPEATED)]
    assert [(flight.line, flight.minutes) for flight in read_flights(path)] == [(2, 227), (4, 227), (5, 227)]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        pytest.param(GOOD.rsplit(",", 1)[0], "the row has 10 fields, not 11", id="too few fields"),
        pytest.param(f"{GOOD},x", "the row has 12 fields, not 11", id="too many fields"),
        pytest.param("", "the row has 0 fields, not 11", id="blank line"),
        pytest.param(row(air_time="long"), "air_time must be a number from 1 to 1440 or NA, not 'long'", id="word"),
        pytest.param(row(air_time="-5"), "air_time must be", id="negative"),
        pytest.param(row(air_time="0"), "air_time must be", id="no minutes"),
        pytest.param(row(air_time="22.7"), "air_time must be", id="fraction"),
        pytest.param(row(air_time="9" * 5_000), "air_time must be", id="enormous"),
        pytest.param(row(air_time="٣"), "air_time must be", id="digit of another script"),
        pytest.param(row(air_time=""), "air_time must be", id="nothing"),
        pytest.param(row(tailnum="NA", air_time="x"), "air_time must be", id="broken, not only dirty"),
        pytest.param(row(dep_time="noon"), "dep_time must be", id="departure"),
        pytest.param(row(flight="NA"), "flight must be a number from 1 to 99999, not 'NA'", id="flight number"),
        pytest.param(row(month="13"), "month must be a number from 1 to 12", id="month"),
        pytest.param(row(month="2", day="30"), "there is no day 30 in month 2 of 2013", id="date"),
        pytest.param(row(tailnum=""), "tailnum must be 1 to 10 letters and digits, not ''", id="no tail"),
        pytest.param(row(carrier="U A"), "carrier must be", id="carrier"),
    ],
)
def test_a_broken_row_names_its_line(tmp_path: Path, bad: str, text: str) -> None:
    error = problem_of(written(tmp_path, GOOD, bad, row(flight="2")))
    assert error.line == 3
    assert text in error.problem


def test_an_open_quote_is_no_csv(tmp_path: Path) -> None:
    assert "no CSV" in problem_of(written(tmp_path, GOOD, '"1,1')).problem


def test_other_columns_are_named(tmp_path: Path) -> None:
    error = problem_of(written(tmp_path, "1,2", header="a,b"))
    assert error.line == 1
    assert "not 'a,b'" in error.problem
    assert HEADER in error.problem


def test_a_plain_text_file_is_no_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n")
    error = problem_of(path)
    assert "no gzip file" in error.problem
    assert error.line is None


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.gz"
    path.touch()
    assert problem_of(path).problem == "the file is empty"


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_a_cut_file_is_refused_whole(tmp_path: Path, share: float) -> None:
    data = JANUARY.read_bytes()
    path = tmp_path / "cut.gz"
    path.write_bytes(data[: int(len(data) * share)])
    error = problem_of(path)
    assert "cut off" in error.problem
    assert error.line is not None


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    data = bytearray(JANUARY.read_bytes())
    data[-8] ^= 1  # in the checksum
    path = tmp_path / "damaged.gz"
    path.write_bytes(data)
    assert "damaged" in problem_of(path).problem


def test_binary_data_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.gz"
    path.write_bytes(gzip.compress(b"\xff\xfe\x00"))
    assert "no UTF-8 text" in problem_of(path).problem


def test_a_missing_file_and_a_folder_cannot_be_read(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "none.gz").problem == "cannot be read: No such file or directory"
    assert "cannot be read" in problem_of(tmp_path).problem


def test_january() -> None:
    survey = survey_flights(JANUARY)
    assert (survey.rows, survey.flights, len(survey.aircraft)) == (27_004, 26_398, 3_140)
    assert survey.rejected == {Reason.NO_TAIL_NUMBER: 155, Reason.NEVER_LEFT: 366, Reason.NO_AIR_TIME: 85}
    assert [each.line for each in read_rows(JANUARY)] == list(range(2, 27_004 + 2))
