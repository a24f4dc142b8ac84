-- The index of one corpus, in memory: one row per passage, holding stems and not words (see words.py).
-- Nothing is stored but the index itself; a passage's number leads back to its text.

-- name: create_index
CREATE VIRTUAL TABLE passage USING fts5 (
    context, -- the ref, the headings above, the names of a table's columns
    body,
    content = '',
    tokenize = 'unicode61 remove_diacritics 0'
);

-- name: add_passage
INSERT INTO passage (rowid, context, body) VALUES (?, ?, ?);

-- name: best_passages
SELECT rowid, -bm25(passage, ?2, 1.0) AS score
FROM passage
WHERE passage MATCH ?1
ORDER BY score DESC, rowid
LIMIT ?3;
