//! Adapters that a worker announces.

use super::ConvertError;
use super::error::bounded;
use super::record::digest;
use crate::v1;
use baton_types::AdapterCard;

impl From<&[AdapterCard]> for v1::Adapters {
    fn from(cards: &[AdapterCard]) -> Self {
        let adapter =
            |card: &AdapterCard| v1::Adapter { name: card.name.clone(), digest: card.digest.0.to_vec().into() };
        Self { adapters: cards.iter().map(adapter).collect() }
    }
}

impl TryFrom<v1::Adapters> for Vec<AdapterCard> {
    type Error = ConvertError;

    fn try_from(message: v1::Adapters) -> Result<Self, ConvertError> {
        bounded("adapters", message.adapters.len(), AdapterCard::COUNT_MAX, "adapters")?;
        let card = |adapter: v1::Adapter| {
            if !AdapterCard::is_name(&adapter.name) {
                let problem = format!("must be 1 to {} visible bytes without spaces", AdapterCard::NAME_BYTES_MAX);
                return Err(ConvertError::new("name", problem));
            }
            Ok(AdapterCard { digest: digest("digest", &adapter.digest)?, name: adapter.name })
        };
        message.adapters.into_iter().map(card).collect::<Result<_, _>>().map_err(|e| e.within("adapters"))
    }
}
