//! The end of what comes for a claim: it is checked and adopted, or cancelled, or both at once.

use super::event::{Said, Trouble};
use super::invariant::Invariant;
use super::world::World;
use baton_kv_transfer::HandoffFailure;
use baton_kv_transfer::pure::{Commit, GRANULE, SinkInput, SumRun, layer_sums};
use baton_types::{ErrorKind, Party, RequestId};
use std::mem::ManuallyDrop;

impl World {
    /// Gives verified blocks to the engine, if they are those that were claimed.
    pub(super) fn deliver(&mut self, w: usize, key: u64, commit: Commit) {
        let here = self.addr(w);
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(incoming) = worker.incoming.get_mut(&key) else { return };
        let Some(lease) = incoming.hold.take() else {
            return self.fail(Invariant::OneOwner, "a delivery without blocks".into());
        };
        let (request, tokens) = (incoming.request.clone(), incoming.tokens as usize);
        let (source_party, conn) = (incoming.source_party.clone(), incoming.conn);
        let wrong = worker.memory.wrong(&lease.blocks().0[0], &commit.tokens[..tokens]);
        let claimed = worker.claims.peek(&request);
        let opened_to = self.net.connections[conn].sink;
        if let Some(position) = wrong {
            return self
                .fail(Invariant::VerifiedKv, format!("KV was delivered that is wrong from position {position} on"));
        }
        let (keeps_alias, reuses_names) = (self.mutant.frees_twice(), self.mutant.reuses_names());
        let Some(worker) = self.worker_mut(w) else { return };
        if keeps_alias {
            worker.aliases.insert(request.clone(), ManuallyDrop::new(lease.alias()));
        }
        let call = worker.claims.take(&request);
        let answer = match call {
            Some(call)
                if (reuses_names && claimed.as_ref().is_some_and(|c| is_other_start(c, &source_party)))
                    || (self.calls[call].tokens == commit.tokens[..tokens] && commit.tokens.len() == tokens + 1) =>
            {
                let named = claimed.filter(|party| *party != source_party || opened_to != here);
                if let Some(named) = named {
                    let is_older = source_party.incarnation < named.incarnation;
                    let broken = if is_older { Invariant::NotAnOlderStart } else { Invariant::NoOtherStart };
                    return self.fail(
                        broken,
                        format!("{request} was claimed for {named}, and KV of {source_party} was adopted"),
                    );
                }
                self.counts.moved("claim", "booked", "adopted");
                self.adopt(w, call, commit.tokens, lease);
                Ok(())
            }
            Some(call) => {
                self.say(w, call, Said::Error(Trouble::new(ErrorKind::Unavailable)));
                Err("its tokens are not those that were claimed".to_owned())
            }
            None => {
                self.counts.add("cancel x commit", "cancelled, then committed");
                Err("the claim is gone".to_owned())
            }
        };
        if answer.is_ok() {
            self.counts.add("sink ends", "adopted");
        }
        self.sink_input(w, key, SinkInput::Delivered(answer));
    }

    /// The checksum thread compares what arrived.
    pub(super) fn check(&mut self, w: usize, key: u64, runs: &[SumRun]) {
        let Some(worker) = self.worker(w) else { return };
        let Some(incoming) = worker.incoming.get(&key) else { return };
        let memory = &worker.memory;
        let mut sums = 0;
        let mut is_right = true;
        for run in runs {
            let start = run.first_granule * GRANULE;
            let granules = (run.sums.len() / memory.map.layout().groups()[0].planes.len()) as u32;
            let tokens = start..(start + granules * GRANULE).min(incoming.tokens);
            let (blocks, layer) = (&incoming.blocks.0[0], usize::from(run.layer));
            let found = layer_sums(&*memory.region, &memory.map, blocks, &memory.heads, 0, layer, tokens);
            is_right &= found == run.sums;
            sums += found.len() as u64;
        }
        let input = if is_right || self.mutant.trusts_bytes() {
            SinkInput::Verified { sums }
        } else {
            SinkInput::Corrupt("checksum differs".into())
        };
        self.sink_input(w, key, input);
    }

    /// The offer of a request that is no longer wanted waits no longer.
    pub(super) fn forget_waiting(&mut self, w: usize, request: &RequestId) {
        let Some(worker) = self.worker_mut(w) else { return };
        worker.waiting.retain(|waiting| worker.incoming.get(&waiting.key).is_none_or(|i| i.request != *request));
        self.grant_waiting(w);
    }

    /// The transfer hears that the request behind a claim is no longer wanted.
    pub(super) fn cancel_incoming(&mut self, w: usize, request: &RequestId) {
        let Some(worker) = self.worker_mut(w) else { return };
        if let Some(alias) = worker.aliases.remove(request) {
            drop(ManuallyDrop::into_inner(alias)); // The defect: whoever took the commit has these blocks, or gave them back.
        }
        let of_it: Vec<u64> =
            worker.incoming.iter().filter(|(_, i)| i.request == *request).map(|(key, _)| *key).collect();
        for key in of_it {
            self.sink_input(w, key, SinkInput::Cancel(HandoffFailure::Aborted("its stream is gone".into())));
        }
    }
}

fn is_other_start(one: &Party, other: &Party) -> bool {
    one.instance == other.instance && one != other
}
