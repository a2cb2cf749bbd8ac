"""The rules: each reads a Scene and claims what it sees. A rule's module says what it claims and shows an example."""
