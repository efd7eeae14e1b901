//! Baton's own fields of answers, the same in each API.

use crate::output::{Finished, Total};
use baton_types::PhaseTimings;
use serde::Serialize;

/// The end of an answer. `crossed_classes` is present only if the answer crossed numerics classes.
#[derive(Serialize)]
pub(crate) struct Ended<'a> {
    timings: &'a PhaseTimings,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    crossed_classes: &'a [String],
}

impl<'a> Ended<'a> {
    pub(crate) fn new(finished: &'a Finished) -> Self {
        Self { timings: &finished.timings, crossed_classes: &finished.crossed_classes }
    }
}

/// Further fields of `usage`: recomputed tokens if there are some, and the cost if there is a price.
#[derive(Serialize)]
pub(crate) struct Spent<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    recomputed_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    currency: Option<&'a str>,
}

impl<'a> Spent<'a> {
    pub(crate) fn new(total: &'a Total) -> Self {
        let cost = total.cost.as_ref();
        Self {
            recomputed_tokens: Some(total.usage.recomputed_tokens).filter(|tokens| *tokens > 0),
            cost: cost.map(|cost| cost.amount),
            currency: cost.map(|cost| cost.currency.as_str()),
        }
    }
}
