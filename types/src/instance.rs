//! Records of instances: what a worker registers, and what a router uses for placement.

use crate::class::{Mismatch, compare};
use crate::{Digest, Incarnation, InstanceId, KvLayout, NumericsClass, SamplingDefaults, TokenId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// One process start of one instance. Offers and claims name both of their parties.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Party {
    pub instance: InstanceId,
    /// Which start of the instance it is.
    pub incarnation: Incarnation,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.instance, self.incarnation)
    }
}

/// What an instance does for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Runs prompts and puts their KV.
    Prefill,
    /// Receives KV and generates.
    Decode,
}

impl Role {
    /// Name in labels and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Everything a router needs to serve a model; owned by the workers.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Id of the model, e.g. `smollm2-135m-instruct`.
    pub id: String,
    /// Further names under which clients may ask for it; the id may be among them.
    pub served_names: Vec<String>,
    /// Revision of the weights, if the source has one.
    pub revision: String,
    /// Digest over configuration and weights.
    pub fingerprint: Digest,
    /// Longest context served, in tokens.
    pub context_max: u32,
    pub vocab: u32,
    /// Ids of all tokens that end a sequence.
    pub end_tokens: Vec<TokenId>,
    /// The model's recommended sampling defaults.
    pub defaults: SamplingDefaults,
    /// Digest of the tokenizer + template bundle; `None` if only token ids are served.
    pub bundle: Option<Digest>,
}

impl ModelCard {
    /// The names that clients may use, the id first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.served_names).map(String::as_str)
    }

    /// The names listed to clients: the further names if there are any, because the id may be a file name.
    pub fn public_names(&self) -> impl Iterator<Item = &str> {
        let further = || self.served_names.iter().filter(|name| **name != self.id);
        std::iter::once(&self.id).filter(move |_| further().next().is_none()).chain(further()).map(String::as_str)
    }

    /// The name that answers give it: the first public one.
    pub fn public_name(&self) -> &str {
        self.public_names().next().unwrap_or(&self.id)
    }
}

/// One rank of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Opaque address of the data plane.
    pub transfer_address: Vec<u8>,
    /// Model layers that it holds.
    pub layers: Range<u32>,
    /// KV heads that it holds.
    pub kv_heads: Range<u32>,
}

/// Protocol versions supported, both over gRPC and on the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolRange {
    /// The oldest version supported.
    pub min: u32,
    /// The newest version supported.
    pub max: u32,
}

impl ProtocolRange {
    /// What this build supports. A version that changes the messages becomes `max`, and the previous one stays as `min`, so that clusters
    /// are upgraded one process at a time.
    ///
    /// 2: a handoff or a get may leave out the beginning of a sequence that the receiving side already has.
    pub const CURRENT: Self = Self { min: 1, max: 2 };

    /// The newest version that both support.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

impl Default for ProtocolRange {
    fn default() -> Self {
        Self::CURRENT
    }
}

/// Written as `1 to 2`.
impl fmt::Display for ProtocolRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

/// The unit of placement.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// Which instance, and which start of it.
    pub party: Party,
    /// Whether it prefills or decodes.
    pub role: Role,
    /// Zone, fabric and the like.
    pub labels: BTreeMap<String, String>,
    /// Pool of replicas that it belongs to.
    pub pool: String,
    /// Address of its gRPC server, `host:port`.
    pub endpoint: String,
    pub card: ModelCard,
    /// Protocol versions it supports.
    pub protocol: ProtocolRange,
    /// Layout of its KV.
    pub layout: KvLayout,
    pub class: NumericsClass,
    /// Tokens whose KV fits in its pool.
    pub capacity_tokens: u64,
    /// Most sequences in its running batch.
    pub running_max: u32,
    /// Most sequences that wait in its queue.
    pub waiting_max: u32,
    /// Its ranks; today always one.
    pub shards: Vec<Shard>,
    /// Optional features it has.
    pub capabilities: Vec<String>,
}

impl InstanceRecord {
    /// Whether it has an optional feature.
    pub fn has_capability(&self, name: &str) -> bool {
        self.capabilities.iter().any(|capability| capability == name)
    }

    /// Whether this instance and `other` can hand requests to each other; otherwise the first difference that prevents it.
    pub fn check_partner(&self, other: &Self) -> Result<(), Mismatch> {
        if self.protocol.common(other.protocol).is_none() {
            return Err(Mismatch::new("protocol", &self.protocol, &other.protocol));
        }
        let (ours, theirs) = (&self.card, &other.card);
        let models = [&ours.fingerprint, &theirs.fingerprint];
        compare(models, [&self.class, &other.class], [&self.layout, &other.layout])?;
        if ours.end_tokens != theirs.end_tokens {
            let shown = |tokens: &[TokenId]| format!("{tokens:?}");
            return Err(Mismatch::new("end tokens", &shown(&ours.end_tokens), &shown(&theirs.end_tokens)));
        }
        if ours.bundle != theirs.bundle {
            let shown = |bundle: Option<Digest>| bundle.map_or("none".into(), |digest| digest.to_string());
            return Err(Mismatch::new("tokenizer and chat template", &shown(ours.bundle), &shown(theirs.bundle)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_is_spoken() {
        let range = |(min, max)| ProtocolRange { min, max };
        let cases = [
            ((1, 1), (1, 1), Some(1)),
            ((1, 2), (1, 1), Some(1)),
            ((1, 2), (2, 3), Some(2)),
            ((1, 3), (1, 3), Some(3)),
            ((1, 9), (4, 5), Some(5)),
            ((1, 1), (2, 3), None),
        ];
        for (a, b, newest) in cases {
            let (a, b) = (range(a), range(b));
            assert_eq!((a.common(b), b.common(a)), (newest, newest), "{a} and {b}");
        }
    }
}
