-- Views of a version over the tables of its files (`addons/ask/version_tables.py`).
--
-- `whole.records` has all columns. `main.records` has those that `*` returns, plus text and tokens if
-- the query names them. `number` counts the rows of all files of a kind and defines their order.
-- Defined before this runs: seq_len(), num_sides() (sequences per record in a pack, 2 for preference
-- pairs), decode_ids(ids) and decode_bytes(raw).

CREATE MACRO digest(list) AS left(sha256(list::VARCHAR), 16);

CREATE VIEW whole.packs AS
SELECT
  split, pack, num_sequences // num_sides() AS num_records, num_tokens, num_trained,
  round(total_weight, 4) AS total_weight, label,
  num_tokens / seq_len() AS fill, greatest(seq_len() - num_tokens, 0) AS num_padding,
  decode_ids(input_ids) AS text, input_ids, trained, loss_weights, record_ids, seq_lengths
FROM files.packs;

-- Tokens of records, from the copy that the record's pack and position point to. A copy is one
-- sequence, or several in a row if `concat` cut it or it is a pair. `start` counts tokens across packs:
--
--   record x of 5 tokens at pack 0, position 3     sequences  pack 0 [. . .] x[a b]  pack 1 x[c d e]
--                                                  start             0         3           5
CREATE VIEW files.heads AS
SELECT r.number, r.num_tokens AS whole, s.*
FROM files.records r JOIN files.sequences s USING (record_id, split, pack, position);

CREATE VIEW files.tokens AS
SELECT number, input_ids, trained, loss_weights FROM files.heads WHERE num_tokens = whole
UNION ALL
SELECT
  head.number,
  flatten(list(s.input_ids ORDER BY s.start)),
  flatten(list(s.trained ORDER BY s.start)),
  flatten(list(s.loss_weights ORDER BY s.start))
FROM (SELECT * FROM files.heads WHERE num_tokens < whole) head
JOIN files.sequences s
  ON s.record_id = head.record_id AND s.start >= head.start AND s.start < head.start + head.whole
GROUP BY head.number
HAVING sum(s.num_tokens) = any_value(head.whole);

-- Used if the query names text or tokens; otherwise `records` is `files.records`.
CREATE VIEW whole.records AS
SELECT
  r.* EXCLUDE (number), decode_ids(t.input_ids) AS text, t.input_ids, t.trained, t.loss_weights
FROM files.records r LEFT JOIN files.tokens t ON t.number = r.number
ORDER BY r.number;

-- Each packed record once, with digests of its tokens, mask and loss weights: 64 bits of SHA-256,
-- empty for weights that are all 1. A changed template changes `ids_digest`, a changed training rule
-- only `mask_digest`, and a changed weight only `weights_digest`. To save memory, tokens are kept
-- only for records that continue in another sequence.
CREATE VIEW whole.contents AS
SELECT
  record_id, split, num_all // greatest(whole, 1) AS copies, whole AS num_tokens,
  CASE WHEN cut_ids IS NULL THEN num_trained
    ELSE list_sum(cut_mask[1 : whole]::INT[])::BIGINT END AS num_trained,
  round(CASE WHEN cut_ids IS NULL THEN total_weight
    ELSE list_sum(cut_weights[1 : whole]::DOUBLE[]) END, 4) AS total_weight,
  label,
  coalesce(ids_digest, digest(cut_ids[1 : whole])) AS ids_digest,
  coalesce(mask_digest, digest(cut_mask[1 : whole])) AS mask_digest,
  coalesce(weights_digest, CASE WHEN cut_weights[1 : whole] = cut_mask[1 : whole]::FLOAT[] THEN ''
    ELSE digest(cut_weights[1 : whole]) END) AS weights_digest
FROM (
  SELECT
    record_id,
    arg_min(split, start) AS split,
    min(start) AS start,
    any_value(whole) AS whole,
    sum(num_tokens)::BIGINT AS num_all,
    arg_min(label, start) AS label,
    arg_min(num_trained, start) AS num_trained,
    arg_min(total_weight, start) AS total_weight,
    arg_min(ids_digest, start) AS ids_digest,
    arg_min(mask_digest, start) AS mask_digest,
    arg_min(weights_digest, start) AS weights_digest,
    flatten(list(input_ids ORDER BY start) FILTER (is_cut)) AS cut_ids,
    flatten(list(trained ORDER BY start) FILTER (is_cut)) AS cut_mask,
    flatten(list(loss_weights ORDER BY start) FILTER (is_cut)) AS cut_weights
  FROM (
    SELECT
      s.*, coalesce(r.num_tokens, s.num_tokens) AS whole, s.num_tokens < whole AS is_cut,
      CASE WHEN NOT is_cut THEN digest(input_ids[1 : whole]) END AS ids_digest,
      CASE WHEN NOT is_cut THEN digest(trained[1 : whole]) END AS mask_digest,
      CASE WHEN is_cut THEN NULL WHEN loss_weights[1 : whole] = trained[1 : whole]::FLOAT[] THEN ''
        ELSE digest(loss_weights[1 : whole]) END AS weights_digest
    FROM files.sequences s
    LEFT JOIN (
      SELECT record_id, arg_max(num_tokens, number) AS num_tokens
      FROM files.records WHERE times > 0 GROUP BY record_id
    ) r ON r.record_id = s.record_id
  )
  GROUP BY record_id
)
ORDER BY start;

CREATE VIEW whole.quarantine AS
SELECT
  source, row, byte_offset, step, reason, detail, raw_size, raw_sha256, decode_bytes(raw) AS raw
FROM files.quarantine;

-- Records that are not in any pack, then rows that never became records.
CREATE VIEW files.left_out AS
SELECT
  r.number, r.source, r.row, r.record_id, r.outcome AS reason, CASE
    WHEN outcome = 'over_seq_len' THEN format('longer than seq_len ({:,} tokens)', seq_len())
    WHEN outcome = 'contaminated' THEN coalesce('shares words with ' || repeats, '')
    ELSE coalesce('repeats ' || kept.place, '') END AS detail, r.repeats
FROM files.records r
LEFT JOIN (
  SELECT record_id, arg_min(source || ' row ' || row, number) AS place
  FROM files.records
  WHERE outcome = 'kept' AND record_id IN (FROM files.records SELECT repeats)
  GROUP BY record_id
) kept ON kept.record_id = r.repeats
WHERE r.outcome <> 'kept'
UNION ALL
SELECT number + 2**62::BIGINT, source, row, NULL, reason, detail, NULL FROM files.dropped;

CREATE VIEW whole.dropped AS
SELECT source, row, record_id, reason, detail, repeats FROM files.left_out ORDER BY number;

CREATE VIEW whole.ledger AS FROM facts_ledger;
CREATE VIEW whole.audit AS FROM facts_audit;
CREATE VIEW whole.versions AS FROM facts_versions;
