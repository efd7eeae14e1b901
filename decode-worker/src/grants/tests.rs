//! Tables of offers against a room of tokens, under virtual time.
