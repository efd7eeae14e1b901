//! Records of instances: what a worker says of itself, and what a router places by.

use crate::{Digest, Incarnation, InstanceId, KvLayout, NumericsClass, SamplingDefaults, TokenId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// One process start of one instance: what tickets name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Party {
    /// Which instance.
    pub instance: InstanceId,
    /// Which start of it.
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
    /// Runs prompts and ships their KV.
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Id of the model, e.g. `smollm2-135m-instruct`.
    pub id: String,
    /// Names under which clients may ask for it; the id is always one.
    pub served_names: Vec<String>,
    /// Revision of the weights, where the source has one.
    pub revision: String,
    /// Digest over configuration and weights.
    pub fingerprint: Digest,
    /// Longest context served, in tokens.
    pub context_max: u32,
    /// Vocabulary size.
    pub vocab: u32,
    /// All end tokens.
    pub end_tokens: Vec<TokenId>,
    /// How the model wants to be sampled.
    pub defaults: SamplingDefaults,
    /// Digest of the tokenizer + template bundle; `None` where only token ids are served.
    pub bundle: Option<Digest>,
}

/// One rank of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Opaque address of the data plane.
    pub transfer_address: Vec<u8>,
    /// Layers held.
    pub layers: Range<u32>,
    /// KV heads held.
    pub kv_heads: Range<u32>,
}

/// Protocol versions spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolRange {
    /// Oldest.
    pub min: u32,
    /// Newest.
    pub max: u32,
}

impl ProtocolRange {
    /// Whether some version is common to both.
    pub fn overlaps(self, other: Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }
}

/// The unit of placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// Which start of which instance.
    pub party: Party,
    /// What it does.
    pub role: Role,
    /// Zone, fabric and the like.
    pub labels: BTreeMap<String, String>,
    /// Pool of replicas that it belongs to.
    pub pool: String,
    /// Where its gRPC listens, `host:port`.
    pub endpoint: String,
    /// Its model.
    pub card: ModelCard,
    /// Protocol versions it speaks.
    pub protocol: ProtocolRange,
    /// Layout of its KV.
    pub layout: KvLayout,
    /// Its numerics class.
    pub class: NumericsClass,
    /// Tokens whose KV its pool holds.
    pub capacity_tokens: u64,
    /// Most sequences in its running batch.
    pub running_max: u32,
    /// Most sequences that wait in its queue.
    pub waiting_max: u32,
    /// Its ranks; one today.
    pub shards: Vec<Shard>,
    /// Optional features it has.
    pub capabilities: Vec<String>,
}
