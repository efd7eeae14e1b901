//! Checks of grammars before a worker is involved: pure compute, so they run off the I/O threads, with bounded concurrency.

use super::turns::Turns;
use crate::admission::Slot;
use crate::request::AskedGrammar;
use baton_node::runtime::blocking;
use baton_types::{ErrorKind, Grammar, RequestError, Runtime, TenantLabel};
use blake3::{Hash, Hasher};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// Most grammars of which it is known that they pass. Clients send the same ones again.
const PASSED_MAX: usize = 256;

/// Checks grammars in turns by tenant. What passed lately is not compiled again.
#[derive(Debug)]
pub(super) struct GrammarChecks {
    turns: Turns,
    passed: Arc<Passed>,
}

impl GrammarChecks {
    pub(super) fn new(at_once: usize) -> Self {
        Self { turns: Turns::new(at_once), passed: Arc::default() }
    }

    /// Refuses a grammar that does not compile; gives `slots` back. If the request ends first, its check keeps them until it is done.
    pub(super) async fn check(
        &self,
        runtime: &dyn Runtime,
        tenant: TenantLabel,
        asked: AskedGrammar,
        deadline: Instant,
        slots: Vec<Slot>,
    ) -> Result<Vec<Slot>, RequestError> {
        let name = name_of(&asked.grammar);
        if self.passed.has(name) {
            return Ok(slots);
        }
        let late = || {
            let message = "the deadline passed before the grammar of the answer was checked";
            RequestError::new(ErrorKind::DeadlineExceeded, message)
        };
        let failed = || RequestError::new(ErrorKind::Internal, "the check of this request's grammar failed");
        let turn = runtime.until(deadline, self.turns.turn(tenant)).await.ok_or_else(late)?;
        // It may have passed for another request meanwhile.
        if self.passed.has(name) {
            return Ok(slots);
        }
        let passed = self.passed.clone();
        let check = move || {
            let _turn = turn;
            let AskedGrammar { grammar, param } = asked;
            let checked = baton_text::grammar::check(&grammar).map(|()| passed.add(name));
            (checked.map_err(|error| RequestError { param: Some(param.into()), ..error.into() }), slots)
        };
        let checked = runtime.until(deadline, blocking(runtime, check)).await.ok_or_else(late)?;
        let (checked, slots) = checked.ok_or_else(failed)?;
        checked.map(|()| slots)
    }
}

/// Names of grammars that passed.
#[derive(Debug, Default)]
struct Passed(Mutex<Vec<Hash>>);

impl Passed {
    /// Whether it is among them. Then it is the last used.
    fn has(&self, name: Hash) -> bool {
        let mut names = self.0.lock();
        let found = names.iter().position(|known| *known == name).map(|at| names.remove(at));
        names.extend(found);
        found.is_some()
    }

    fn add(&self, name: Hash) {
        let mut names = self.0.lock();
        names.retain(|known| *known != name);
        if names.len() >= PASSED_MAX {
            names.remove(0);
        }
        names.push(name);
    }
}

fn name_of(grammar: &Grammar) -> Hash {
    let mut hasher = Hasher::new();
    serde_json::to_writer(&mut hasher, grammar).expect("a grammar is written without errors");
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::runtime::TokioRuntime;
    use futures::FutureExt as _;
    use std::time::Duration;

    const A: TenantLabel = TenantLabel(1);
    const B: TenantLabel = TenantLabel(2);

    fn regex(of: &str) -> AskedGrammar {
        AskedGrammar { grammar: Arc::new(Grammar::Regex(of.into())), param: "guided_regex" }
    }

    #[tokio::test]
    async fn a_grammar_that_passed_needs_no_turn() {
        let (checks, runtime) = (GrammarChecks::new(1), TokioRuntime::current());
        let deadline = Instant::now() + Duration::from_secs(60);
        let check = |of: &str| checks.check(&runtime, A, regex(of), deadline, Vec::new());
        check("[0-9]+").await.unwrap();
        for _ in 0..2 {
            let error = check("[0-9").await.unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::InvalidRequest, Some("guided_regex")));
        }
        let _turn = checks.turns.turn(B).await;
        check("[0-9]+").now_or_never().unwrap().unwrap();
        assert!(check("[0-9]*").now_or_never().is_none(), "another grammar");
    }

    #[tokio::test]
    async fn who_waited_for_a_turn_finds_what_passed_meanwhile() {
        let (checks, runtime) = (GrammarChecks::new(1), TokioRuntime::current());
        let deadline = Instant::now() + Duration::from_secs(60);
        let check = || Box::pin(checks.check(&runtime, A, regex("[0-9]+"), deadline, Vec::new()));
        let [mut first, mut second] = [check(), check()];
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let turn = checks.turns.turn(B).await;
        check().now_or_never().expect("it is known before its turn ends").unwrap();
        drop(turn);
        second.now_or_never().expect("it would be pending on another thread").unwrap();
        first.await.unwrap();
    }

    #[test]
    fn the_last_used_are_kept() {
        let passed = Passed::default();
        let name = |i: usize| name_of(&Grammar::Regex(i.to_string()));
        for i in 0..PASSED_MAX {
            passed.add(name(i));
        }
        assert!(passed.has(name(0)));
        passed.add(name(PASSED_MAX));
        assert!(passed.has(name(0)) && passed.has(name(2)) && !passed.has(name(1)));
        assert_eq!(passed.0.lock().len(), PASSED_MAX);
    }
}
