//! Parts of a chat's answer: reasoning, content and calls of tools.

use baton_text::answer::{AnswerParser, CallFormat, Part};

/// How the parts of the answers of one request are told apart.
#[derive(Clone)]
pub(crate) struct Parts {
    /// For an answer of which nothing came yet.
    pub(crate) parser: AnswerParser,
    pub(crate) format: CallFormat,
}

/// Digits of a call's id.
const ID_DIGITS: usize = 24;
/// Mistral's templates accept no other length.
const MISTRAL_ID_DIGITS: usize = 9;

impl Parts {
    /// Id of a call, which begins with `prefix` where the template accepts that. It follows from the answer's id, the
    /// sample and its place there.
    pub(crate) fn call_id(&self, prefix: &str, answer: &str, sample: u32, index: u32) -> String {
        let digest = blake3::hash(format!("{answer} {sample} {index}").as_bytes()).to_hex();
        match self.format {
            CallFormat::Mistral | CallFormat::MistralArgs => digest[..MISTRAL_ID_DIGITS].to_owned(),
            _ => format!("{prefix}{}", &digest[..ID_DIGITS]),
        }
    }
}

/// A whole answer is read in such pieces: for each mark, what was not read yet is searched.
const PIECE_BYTES: usize = 1 << 10;

/// Reads the parts of one answer, which is all content if it has none.
pub(crate) struct PartsReader(Option<AnswerParser>);

impl PartsReader {
    pub(crate) fn new(parts: Option<&Parts>) -> Self {
        Self(parts.map(|parts| parts.parser.clone()))
    }

    /// The parts that this text completes.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        match &mut self.0 {
            Some(parser) => parser.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Content(text.to_owned())],
        }
    }

    /// The parts that the end of the answer completes.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        self.0.as_mut().map_or_else(Vec::new, AnswerParser::finish)
    }

    /// Whether the answer is in its reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.0.as_ref().is_some_and(AnswerParser::is_reasoning)
    }

    /// The parts of a whole answer: of neighbours of one kind, only calls stay apart.
    pub(crate) fn whole(mut self, text: &str) -> Vec<Part> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
            parts.extend(self.push(piece));
            rest = after;
        }
        parts.extend(self.finish());
        let mut whole: Vec<Part> = Vec::new();
        for part in parts {
            match (whole.last_mut(), part) {
                (Some(Part::Content(before)), Part::Content(text)) => before.push_str(&text),
                (Some(Part::Reasoning(before)), Part::Reasoning(text)) => before.push_str(&text),
                (_, part) => whole.push(part),
            }
        }
        whole
    }
}
