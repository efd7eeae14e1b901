//! The grammars of the worker's model, for its engine.

use baton_engine::{GrammarState, Grammars};
use baton_kernels::sampling::TokenSet;
use baton_text::TextError;
use baton_text::grammar::{self, CompiledGrammar, GrammarCompiler};
use baton_types::{Grammar, RequestError, TokenId};
use parking_lot::Mutex;

/// Compiled grammars that are kept, since clients send the same ones again. Each may take some ten MB.
const RECENT_MAX: usize = 16;

pub(crate) struct ModelGrammars {
    compiler: GrammarCompiler,
    /// The last used is the last.
    recent: Mutex<Vec<(Grammar, CompiledGrammar)>>,
}

impl ModelGrammars {
    pub(crate) fn new(compiler: GrammarCompiler) -> Self {
        Self { compiler, recent: Mutex::default() }
    }

    fn compiled(&self, grammar: &Grammar) -> Result<CompiledGrammar, TextError> {
        let mut recent = self.recent.lock();
        let found = recent.iter().position(|(known, _)| known == grammar).map(|at| recent.remove(at));
        let (grammar, compiled) = match found {
            Some(found) => found,
            None => {
                // Others do not wait for a grammar that takes long.
                drop(recent);
                let compiled = self.compiler.compile(grammar)?;
                recent = self.recent.lock();
                recent.retain(|(known, _)| known != grammar);
                (grammar.clone(), compiled)
            }
        };
        if recent.len() >= RECENT_MAX {
            recent.remove(0);
        }
        recent.push((grammar, compiled.clone()));
        Ok(compiled)
    }
}

impl Grammars for ModelGrammars {
    fn stack_bytes(&self) -> usize {
        grammar::STACK_BYTES
    }

    fn start(&self, grammar: &Grammar, answer: &[TokenId]) -> Result<Box<dyn GrammarState>, RequestError> {
        let mut state = self.compiled(grammar)?.start();
        state.advance(answer)?;
        Ok(Box::new(Following(state)))
    }
}

struct Following(grammar::GrammarState);

impl GrammarState for Following {
    fn allowed(&mut self) -> Result<TokenSet, RequestError> {
        Ok(TokenSet::from_words(&self.0.allowed()?))
    }

    fn advance(&mut self, token: TokenId) -> Result<(), RequestError> {
        Ok(self.0.advance(&[token])?)
    }
}
