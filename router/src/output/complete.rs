//! A complete answer, gathered within the memory budget.

use super::budget::make_room;
use super::events::{Events, lost};
use super::{Delta, Event, Finished, Total};
use baton_node::intake::Hold;
use baton_types::RequestError;
use futures::StreamExt as _;
use std::collections::BTreeMap;

/// A complete answer, and the memory held for it and for its serialized form.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Every sample, in order.
    pub(crate) samples: Vec<(Delta, Finished)>,
    /// All of them together.
    pub(crate) total: Total,
    /// The memory held for the answer and its serialized form.
    pub(crate) hold: Hold,
    /// How much of that is for the serialized form.
    pub(crate) written: u64,
}

impl Events {
    /// Gathers the whole answer within the budget. `written` returns the bytes that a delta will add to the answer;
    /// `before` is the size of the rest.
    pub(crate) async fn gather(
        mut self,
        hold: Hold,
        before: u64,
        written: impl Fn(&Delta) -> u64,
    ) -> Result<Gathered, RequestError> {
        let mut deltas: BTreeMap<u32, Delta> = BTreeMap::new();
        let mut whole = Gathered { samples: Vec::new(), total: Total::default(), hold, written: before };
        let mut kept = 0;
        make_room(&mut whole.hold, whole.written)?;
        loop {
            match self.next().await.unwrap_or_else(|| Err(lost()))? {
                Event::Delta(delta) => {
                    kept += delta.bytes();
                    whole.written += written(&delta);
                    make_room(&mut whole.hold, kept + whole.written)?;
                    let sample = deltas.entry(delta.sample).or_default();
                    sample.text += &delta.text;
                    sample.token_ids.extend(delta.token_ids);
                    sample.logprobs.extend(delta.logprobs);
                    sample.prompt.extend(delta.prompt);
                }
                Event::Finished(mut finished) => {
                    let total = finished.total.take();
                    whole.samples.push((deltas.remove(&finished.sample).unwrap_or_default(), finished));
                    if let Some(total) = total {
                        whole.total = total;
                        whole.samples.sort_by_key(|(_, finished)| finished.sample);
                        return Ok(whole);
                    }
                }
            }
        }
    }
}
