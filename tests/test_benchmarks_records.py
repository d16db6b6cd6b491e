"""benchmarks.records: several runs in one file, of each case the last measurement."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import options, records  # noqa: E402


def test_a_later_run_replaces_rows_and_headers_stay(tmp_path):
    old = {"commit": "a", "records": [{"op": "x", "case": "1", "us": 2}, {"op": "x", "case": "2"}]}
    new = {"commit": "b", "records": [{"op": "x", "case": "1", "us": 1}]}
    gone = {"commit": "c", "records": [{"op": "x", "case": "2", "us": 9}]}
    paths = [tmp_path / name for name in ("gone.json", "old.json", "new.json")]
    for path, run in zip(paths, (gone, old, new), strict=True):
        path.write_text(json.dumps(run))
    out = tmp_path / "out.json"
    records.main([*map(str, paths), "--json", str(out)])
    assert records.runs(out) == [{"commit": "a", "records": [{"op": "x", "case": "2"}]}, new]
    assert records.rows([out]) == [{"op": "x", "case": "2"}, {"op": "x", "case": "1", "us": 1}]
    assert records.runs(paths[2]) == [new]


def test_committed_files_have_each_case_once():
    """Rows of one file differ in what they measured, and every run says where and when."""
    paths = sorted((ROOT / "benchmarks/results").rglob("*.json"))
    assert len(paths) > 20
    for path in paths:
        runs = [run for run in records.runs(path) if "records" in run]
        rows = [row for run in runs for row in run["records"]]
        kept = [row for run in records.merged(runs) for row in run["records"]]
        assert len(kept) == len(rows) or "op" not in rows[0], path
        assert all({"date", "commit", "jax"} <= set(run) for run in runs), path


def test_headers_and_options(tmp_path):
    parser = options.new_parser("moe", "The first line.\n\nMore.")
    options.record_options(parser.add_argument, "shape", "show these", nargs="+")
    text = " ".join(parser.format_help().split())
    assert text.startswith("usage: python -m benchmarks.moe ")
    assert "The first line." in text
    assert "the record, rewritten after every shape" in text
    args = parser.parse_args(["--commit", "abc", "--json", str(tmp_path / "new" / "a.json")])
    assert args.records is None
    head = records.run_header(args, ["numpy", "no-such-package"])
    assert (head["commit"], head["versions"]["no-such-package"]) == ("abc", None)
    assert head["versions"]["numpy"]
    records.write_record(None, head)
    records.write_record(args.json, head | {"records": []})
    assert records.runs(args.json) == [head | {"records": []}]
