//! Encoding with the tokenizers crate, for every BPE model that [`super::byte_level`] does not support. It stores an
//! origin for every byte, which takes about a hundred bytes of memory per byte of text.

use tokenizers::normalizer::Range as TextRange;
use tokenizers::tokenizer::{Model, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
use tokenizers::{NormalizedString, Token, Tokenizer as Library};

use super::added::{AddedTokens, Part};
use super::vocab::Vocab;
use crate::ControlSpan;
use baton_types::TokenId;

/// The steps of the crate's own `Tokenizer::encode`, with our split at control tokens instead of its own.
pub(super) fn encode(
    library: &Library,
    added: &AddedTokens,
    vocab: &Vocab,
    text: &str,
    controls: &[ControlSpan],
) -> tokenizers::Result<Vec<TokenId>> {
    let mut pieces = PreTokenizedString::from(text);
    pieces.split(|_, text| Ok(slices(&text, added.split_raw(text.get(), controls))))?;
    pieces.split(|_, mut text| {
        library.get_normalizer().map_or(Ok(()), |n| n.normalize(&mut text))?;
        Ok(slices(&text, added.split_normalized(text.get())))
    })?;
    library.get_pre_tokenizer().map_or(Ok(()), |p| p.pre_tokenize(&mut pieces))?;
    pieces.tokenize(|word| encode_word(library, vocab, word.get()))?;
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref()).flatten().map(|t| t.id).collect())
}

/// The parts of a text, in the crate's type.
fn slices(text: &NormalizedString, parts: Vec<Part>) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let slice = |Part { range, token }: Part| {
        let token = token.map(|id| vec![Token::new(id, String::new(), (0, range.len()))]);
        (text.slice(TextRange::Normalized(range)).expect("parts end at characters"), token)
    };
    parts.into_iter().map(slice).collect()
}

/// The model's tokens of one word. A vocabulary may produce a control token by plain merges; such a word is encoded in
/// halves.
fn encode_word(library: &Library, vocab: &Vocab, word: &str) -> tokenizers::Result<Vec<Token>> {
    let tokens = library.get_model().tokenize(word)?;
    if !tokens.iter().any(|t| vocab.is_forbidden(t.id)) {
        return Ok(tokens);
    }
    let (middle, _) = word.char_indices().nth(word.chars().count() / 2).unwrap_or_default();
    if middle == 0 {
        return Err(format!("{word:?} is a control token and nothing else").into());
    }
    let mut halves = encode_word(library, vocab, &word[..middle])?;
    halves.extend(encode_word(library, vocab, &word[middle..])?);
    Ok(halves)
}
