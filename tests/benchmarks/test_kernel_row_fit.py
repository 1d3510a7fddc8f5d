import dataclasses
import json

import numpy as np
import pytest
from kernel_rows.calibration import Calibration
from kernel_rows.families import Work, work_of
from kernel_rows.fitting import MOST, MOST_LAUNCH_US, fit
from kernel_rows.rows import FOLDS, as_row, read_rows
from kernel_rows.scoring import Estimated, namings, scores


def row(number, measured_us, *, impl="xla", op="matmul", size=None):
    size = size or 128 * (number + 1)
    return as_row(
        {
            "id": f"r{number}",
            "case_id": f"c{number}",
            "device": "v6e",
            "op": op,
            "impl": impl,
            "dims": {"m": size, "k": 512, "n": 512},
            "shapes": {},
            "dtypes": {"x": "bfloat16"},
            "config": {},
            "static_args": {},
            "mask_kind": None,
            "group_sizes": None,
            "measured_us": measured_us,
            "timing_method": "xprof_device_span",
            "source_date": "2026-08",
        }
    )


def works(*, launch=3.0, products=1.4, traffic=0.5, count=30, outlier=None):
    made = []
    for number in range(count):
        work = work_of(row(number, 1.0))
        assert isinstance(work, Work)
        terms = work.terms
        time_us = launch + products * terms["products"] + traffic * terms["traffic"]
        if number == outlier:
            time_us *= 20
        timed = dataclasses.replace(work.row, measured_us=time_us)
        made.append(dataclasses.replace(work, row=timed))
    return made


def test_a_fit_finds_the_factors_the_times_were_made_with():
    found = fit(works())
    for work in works():
        estimate = sum(found[name] * value for name, value in work.terms.items())
        assert estimate == pytest.approx(work.row.measured_us, rel=0.02)


def test_one_row_of_another_program_does_not_move_the_others():
    found = fit(works(outlier=7))
    errors = [
        abs(sum(found[n] * v for n, v in w.terms.items()) / w.row.measured_us - 1) for w in works()
    ]
    assert np.median(errors) < 0.02


def test_no_factor_is_negative_or_beyond_belief():
    found = fit(works(launch=500.0, products=40.0))
    assert found["launch"] <= MOST_LAUNCH_US
    assert all(0 <= value <= MOST for name, value in found.items() if name != "launch")


def test_a_shape_is_never_estimated_by_constants_that_saw_it():
    honest = works()
    target = honest[11]
    changed = dataclasses.replace(
        target, row=dataclasses.replace(target.row, measured_us=target.row.measured_us * 100)
    )
    lied_to = [changed if work is target else work for work in honest]
    before = Calibration.fit(honest, source="test").estimate_us(target)
    after = Calibration.fit(lied_to, source="test").estimate_us(target)
    assert before == after


def test_constants_survive_their_file(tmp_path):
    made = Calibration.fit(works(), source="test")
    path = tmp_path / "constants.json"
    made.write(path)
    read = Calibration.read(path)
    assert read.shapes == made.shapes
    assert len(read.without_fold) == FOLDS
    for work in works():
        assert read.estimate_us(work) == pytest.approx(made.estimate_us(work), rel=1e-2)


def test_rows_are_read_compressed_or_not(tmp_path):
    import gzip
    import json

    fields = {
        field.name: getattr(row(0, 5.0), field.name) for field in dataclasses.fields(row(0, 5.0))
    }
    text = json.dumps([fields])
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text.encode()))
    both = (read_rows(tmp_path / name) for name in ("a.json", "a.json.gz"))
    assert all(found == ([row(0, 5.0)], {}) for found in both)


def estimated(number, measured_us, estimate_us, **kwargs):
    return Estimated(row(number, measured_us, **kwargs), estimate_us)


def test_a_score_has_bars_that_can_be_missed():
    good = [estimated(i, 10.0 * (i + 1), 11.0 * (i + 1)) for i in range(6)]
    slow = [estimated(i, 10.0 * (i + 1), 14.0 * (i + 1)) for i in range(6)]
    mixed = [estimated(i, 10.0 * (i + 1), 10.0 * (7 - i)) for i in range(6)]
    (met,) = scores(good)
    (off,) = scores(slow)
    (wrong,) = scores(mixed)
    (few,) = scores(good[:4])
    assert met.bars_met is True
    assert met.median_error == pytest.approx(0.1)
    assert off.bars_met is False
    assert wrong.bars_met is False
    assert few.bars_met is None


def test_the_faster_is_named_where_both_were_measured():
    rows = [
        estimated(0, 10, 10, size=256),
        estimated(1, 20, 30, size=256, impl="pallas"),
        estimated(2, 10, 40, size=512),
        estimated(3, 20, 30, size=512, impl="pallas"),
        estimated(4, 10, 40, size=1024),
    ]
    one, total = namings(rows)
    assert (one.compared, one.right) == (2, 1)
    assert total.op == "all"


def test_rows_that_lack_something_are_counted_and_the_others_kept(tmp_path):
    good = {"id": "1", "device": "v6e", "op": "o", "impl": "i", "dims": {}, "measured_us": 5.0}
    bad = [{**good, "measured_us": 0}, {**good, "measured_us": None}, "text", {"measured_us": 1}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([good, *bad]))
    rows, wrong = read_rows(path)
    assert [row.id for row in rows] == ["1"]
    assert wrong == {"not as the others are written": 3, "no id": 1}
    path.write_text('{"rows":')
    with pytest.raises(SystemExit, match="is not JSON"):
        read_rows(path)
