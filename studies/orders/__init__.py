"""Who goes first: every order, batches of alike lengths, fairness among users, urgent requests; in
virtual time, seeded. A part is one module.
"""
