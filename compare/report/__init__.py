"""What a saved run says: tables, sentences, figures, and a page that needs no network."""
