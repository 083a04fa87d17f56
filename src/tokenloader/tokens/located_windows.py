"""TEMPORARY shim until the tokens branch lands."""


class LocatedWindows:
    def __init__(self, tokens, starts, length):
        self.t, self.s, self.n = tokens, starts, length

    def is_cached(self):
        return self.t.is_cached(int(self.s[0]))

    def prefetch(self):
        self.t.prefetch(self.s, self.n)

    def copy(self):
        return self.t.gather(self.s, self.n)
