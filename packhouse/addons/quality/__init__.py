"""Quality of texts: empty answers, refusals, repetition, HTML, personal data, secrets, language.

Each function takes Arrow texts and returns an answer for each, null for null, from the text alone:
regular expressions of RE2 and numpy, in time linear in the text. `where`, `select` and `packhouse
sql` call them (`TEXT_FUNCTIONS` of the registry); the audit counts rows by them where a recipe has
`audit.quality`.
"""
