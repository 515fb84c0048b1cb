"""Reports of saved runs: tables, sentences, figures, and a page that needs no network."""
