//! Shared vocabulary of every Baton crate: ids, tokens, sampling parameters, KV layout, memory, limits and errors.
//!
//! Layer: the root of the dependency graph. Every crate depends on `types`; `types` depends on none of them.
//!
//! This crate does no I/O and contains no protobuf and no numeric kernel. Of an async runtime it has only the trait that tasks use.

pub mod attention;
pub mod blocks;
pub mod bundle;
mod capacity;
pub mod class;
pub mod defect;
pub mod dtype;
pub mod error;
pub mod events;
pub mod fence;
mod grammar;
pub mod ids;
pub mod instance;
pub mod layout;
pub mod memory;
pub mod places;
pub mod pool_map;
pub mod runtime;
pub mod sampling;
pub mod sequence;
pub mod share;
mod shown;

pub use attention::{Attention, AttentionGroup, LayerKv, SlidingWindow};
pub use blocks::{BlockTable, BlockTables, GroupBlocks};
pub use bundle::{GgufTokenizer, SamplingDefaults, TextBundle};
pub use capacity::PoolDemand;
pub use class::{Compatibility, Digest, Mismatch, NumericsClass, WeightFormat};
pub use dtype::Dtype;
pub use error::{ErrorKind, RequestError};
pub use events::{AdapterCard, BlockCounts, DecodeEvent, GeneratedToken, LoadReport, PrefillEvent, TransferReport};
pub use fence::{Fence, FencePoll, FenceStatus};
pub use grammar::{CallGrammar, CallsGrammar, Grammar, GrammarPiece, GrammarSizeError};
pub use ids::{BlockId, Incarnation, InstanceId, RequestId, TenantId, TicketId, TokenId};
pub use instance::{InstanceRecord, ModelCard, Party, ProtocolRange, Role, Shard};
pub use layout::{GroupKind, KvGroup, KvLayout, KvPlane, LayoutError, WATERMARK_BLOCKS};
pub use memory::MemoryKind;
pub use pool_map::KvPoolMap;
pub use runtime::{BoxFuture, Clock, Runtime, SystemClock};
pub use sampling::{
    PROMPT_LOGPROBS, SAMPLING_BAD_WORDS, SAMPLING_CONSTRAINTS, SAMPLING_MIN_P, SAMPLING_TYPICAL_P, SamplingError,
    SamplingParams,
};
pub use sequence::{
    CacheUse, FinishReason, PhaseTimings, PromptLogprob, PromptLogprobs, SequenceSpec, TokenLogprobs, Usage,
};
pub use share::{Share, TenantLabel, Weight, WeightError};
pub use shown::shown;
