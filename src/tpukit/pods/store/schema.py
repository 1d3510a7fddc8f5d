"""The tables of the store. A change is a new entry of `VERSIONS`; old ones are never edited."""

_FIRST = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- Who to ask: enough to open the same provider again after a restart, and nothing secret.
CREATE TABLE providers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    launch TEXT NOT NULL,
    used_at REAL NOT NULL
) WITHOUT ROWID;

-- What should be there. `zone` and `asked_at` are written before a provider is asked, so that
-- whoever comes after a crash knows where something may have been made. `keeper` is who replaces
-- the pod when it is lost, where that is not the reconciler; `kept_at` when it last said so.
CREATE TABLE wanted (
    name TEXT PRIMARY KEY,
    provider TEXT NOT NULL REFERENCES providers (id),
    config TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    zone TEXT,
    asked_at REAL,
    wanted_at REAL NOT NULL,
    released_at REAL,
    keeper TEXT,
    kept_at REAL
) WITHOUT ROWID;

-- What was there when it was last looked at.
CREATE TABLE observed (
    name TEXT PRIMARY KEY REFERENCES wanted (name) ON DELETE CASCADE,
    pod TEXT NOT NULL,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

-- One pod from being asked for to its end, whether it was ever there or not.
CREATE TABLE lives (
    id INTEGER PRIMARY KEY,
    provider TEXT NOT NULL,
    zone TEXT NOT NULL,
    pod TEXT NOT NULL,
    slice TEXT NOT NULL,
    tier TEXT NOT NULL,
    asked_at REAL NOT NULL,
    ready_at REAL,
    ended_at REAL,
    cause TEXT
);
CREATE UNIQUE INDEX lives_once ON lives (provider, zone, pod) WHERE ended_at IS NULL;
CREATE INDEX lives_by_end ON lives (provider, slice, tier, zone, ended_at);

-- Attempts at a run, as `supervision.journal` describes them.
CREATE TABLE attempts (
    run TEXT NOT NULL,
    number INTEGER NOT NULL,
    attempt TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    subject TEXT NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX events_by_subject ON events (subject, id);

-- From ready to released, with the price that held when it began.
CREATE TABLE spend (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    pod TEXT NOT NULL,
    provider TEXT NOT NULL,
    zone TEXT NOT NULL,
    slice TEXT NOT NULL,
    tier TEXT NOT NULL,
    price TEXT NOT NULL,
    ready_at REAL NOT NULL,
    released_at REAL
);
CREATE UNIQUE INDEX spend_once ON spend (provider, zone, pod) WHERE released_at IS NULL;
"""

_SEEN = """
-- When a pod was last seen, and since when its provider has not answered: what nobody can see is
-- not counted.
ALTER TABLE spend ADD COLUMN seen_at REAL;
ALTER TABLE providers ADD COLUMN silent_since REAL;
"""

VERSIONS = (_FIRST, _SEEN)
"""What brings a store from each version to the next; a new one starts at the first."""
