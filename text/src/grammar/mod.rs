//! Grammars of answers: which tokens may come next, by llguidance.
//!
//! A [`GrammarCompiler`] belongs to a model; a [`CompiledGrammar`] may start many answers; a [`GrammarState`] follows one of them, token by
//! token. The state is a function of the grammar and of the tokens of the answer alone, so it is rebuilt from them wherever an answer
//! continues. [`check`] needs no model.
//!
//! Control tokens are no text of a grammar: only the end tokens of the model may follow, where the text is whole.
//!
//! Some of llguidance recurses along chains of rules and references, which [`Grammar::check`] bounds: all of it must run on threads of
//! [`STACK_BYTES`].

mod bounds;
mod multiples;
mod schemas;
mod source;

pub use source::lenient;

use crate::{TextError, Tokenizer};
use baton_types::{Grammar, TokenId};
use llguidance::{Matcher, ParserFactory};
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::thread;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

/// Names the rules by which masks follow from a grammar. Workers with the same name draw the same tokens.
pub const REVISION: &str = "grammar-2-llguidance-1.9.1";

/// Stack of threads that compile and follow grammars. The longest chains that fit a grammar take some ten MB; only what is used is
/// resident.
pub const STACK_BYTES: usize = 256 << 20;

/// Most states of the lexer of one answer, of which text of a bounded length takes nine a character. 50,000 take 15 to 30 MB.
const LEXER_STATES_MAX: usize = 50_000;
/// Most rules that may go on at one place of an answer: more than a choice has texts.
const ROW_ITEMS_MAX: usize = 5_000;
/// Most symbols of a grammar's rules.
const RULES_MAX: usize = 200_000;

/// Compiles grammars for one model.
pub struct GrammarCompiler {
    factory: ParserFactory,
}

impl GrammarCompiler {
    /// For a model with this tokenizer, logits of `vocab` tokens and these end tokens.
    ///
    /// # Errors
    /// If the model has no end token in its vocabulary: an answer that is whole could not end.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, end_tokens: &[TokenId]) -> Result<Self, TextError> {
        let ends: Vec<TokenId> = end_tokens.iter().copied().filter(|end| (*end as usize) < vocab).collect();
        if ends.is_empty() {
            return Err(TextError::Grammar("this model has no end token, so no grammar can end its answers".into()));
        }
        let word = |id| {
            let is_text = !tokenizer.is_special(id) && !ends.contains(&id);
            let mark: &[u8] = if is_text { &[] } else { &[TokTrie::SPECIAL_TOKEN_MARKER] };
            tokenizer
                .token_bytes(id)
                .filter(|bytes| !bytes.is_empty())
                .map_or(Vec::new(), |bytes| [mark, bytes].concat())
        };
        let words: Vec<Vec<u8>> = (0..vocab as TokenId).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, ends[0]), &words).with_eos_tokens(&ends);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        Ok(Self { factory: factory(trie, &slices)? })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// What is wrong with it, in words for its author.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, TextError> {
        let parser = self.factory.create_parser(source::top_level(grammar)?);
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(refused(&error)),
            None => Ok(CompiledGrammar(matcher)),
        }
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

fn factory(trie: TokTrie, slices: &[String]) -> Result<ParserFactory, TextError> {
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let broken = |error| TextError::Broken(format!("no grammars can be made of its tokens: {error}"));
    // Every token is drawn: tokens that a grammar forces are no exception.
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), slices).map_err(broken)?;
    factory.quiet();
    let limits = factory.limits_mut();
    (limits.max_lexer_states, limits.max_grammar_size, limits.verbose_errors) = (LEXER_STATES_MAX, RULES_MAX, false);
    limits.max_items_in_row = ROW_ITEMS_MAX;
    // It would take seconds for some expressions.
    limits.precompute_large_lexemes = false;
    Ok(factory)
}

/// A grammar that answers may follow.
#[derive(Clone)]
pub struct CompiledGrammar(Matcher);

impl CompiledGrammar {
    /// The state of an answer without tokens.
    pub fn start(&self) -> GrammarState {
        // Shared, the states of other answers would count against the bounds of this one.
        GrammarState(self.0.deep_clone())
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

/// Where an answer stands in its grammar.
pub struct GrammarState(Matcher);

impl GrammarState {
    /// Takes the next tokens of the answer.
    ///
    /// # Errors
    /// If one of them was not allowed, or if it takes too much work.
    pub fn advance(&mut self, tokens: &[TokenId]) -> Result<(), TextError> {
        self.0.consume_tokens(tokens).map_err(|error| refused(&error.to_string()))
    }

    /// The tokens that may come next as bits, 32 a word; never none: those that end the answer where it is whole.
    ///
    /// # Errors
    /// If it takes too much work.
    pub fn allowed(&mut self) -> Result<Vec<u32>, TextError> {
        let mask = self.0.compute_mask_or_eos().map_err(|error| refused(&error.to_string()))?;
        if mask.is_zero() {
            return Err(TextError::Grammar("no token of the model can continue the answer".into()));
        }
        Ok(mask.as_slice().to_vec())
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

/// Most bytes of an error that are told: some repeat the grammar.
const ERROR_BYTES_MAX: usize = 512;

fn refused(error: &str) -> TextError {
    let error = error.split("\n<").next().unwrap_or_default();
    TextError::Grammar(error[..error.floor_char_boundary(ERROR_BYTES_MAX)].to_owned())
}

/// Compiles a grammar for its errors alone, over the 256 bytes as tokens. Blocks.
///
/// # Errors
/// What is wrong with it, in words for its author.
pub fn check(grammar: &Grammar) -> Result<(), TextError> {
    static BYTES: LazyLock<Result<GrammarCompiler, String>> = LazyLock::new(|| {
        let end = b"\xffend".to_vec();
        let words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([end]).collect();
        let trie = TokTrie::from(&TokRxInfo::new(257, 256), &words);
        factory(trie, &[]).map(|factory| GrammarCompiler { factory }).map_err(|error| error.to_string())
    });
    let failed = |error: &dyn fmt::Display| TextError::Broken(format!("grammars cannot be checked: {error}"));
    let compiler = BYTES.as_ref().map_err(|error| failed(error))?;
    let compile = || {
        // The control tokens of calls are the model's.
        let without_tokens = match grammar {
            Grammar::Calls(calls) => Some(Grammar::Calls(calls.without_tokens())),
            _ => None,
        };
        let mut state = compiler.compile(without_tokens.as_ref().unwrap_or(grammar))?.start();
        state.allowed().map(drop)
    };
    thread::scope(|scope| {
        let compiled =
            thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn_scoped(scope, compile);
        let panicked = |_| TextError::Grammar("it cannot be compiled".into());
        compiled.map_err(|error| failed(&error))?.join().map_err(panicked)?
    })
}
