//! The functions of the conformance suite. Each takes the transport that it runs on.
#![allow(missing_docs, unreachable_pub)]

pub mod failing;
pub mod getting;
pub mod moving;
pub mod parts;
pub mod refusing;
pub mod sharding;
pub mod states;

use crate::common::{Node, NodeConfig, small};
use baton_kv_transfer::{Hazard, TransportChoice};

/// One start of a node.
pub fn a_start(choice: &TransportChoice, name: &'static str, incarnation: u64, hazard: Option<Hazard>) -> Node {
    let mut config = NodeConfig::new(name, small(16), 24);
    (config.incarnation, config.hazards) = (incarnation, hazard.into());
    config.start(choice.clone())
}

/// A source and a sink with the same small layout.
pub fn pair(choice: &TransportChoice) -> (Node, Node) {
    (
        NodeConfig::new("p", small(16), 24).start(choice.clone()),
        NodeConfig::new("d", small(16), 24).start(choice.clone()),
    )
}
