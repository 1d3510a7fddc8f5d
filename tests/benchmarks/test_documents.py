"""The table of the documents' figures: each of ours has an origin or a reason."""

from documents import rows


def test_every_figure_of_ours_says_where_it_came_from():
    documents: set[str] = set()
    for row in rows(compiled=False):
        documents.add(row.document)
        if "1B on v" in row.what:
            continue  # the planner's, which takes seconds
        ours = row.ours()
        assert ours.origin or ours.reason, row.what
        assert row.stated
    assert documents == {"000", "001", "002", "003", "004"}
