//! Generates names: incarnations, request ids, default instance ids.

use baton_types::{Incarnation, InstanceId, RequestId};

/// A new incarnation: 64 random bits, so that no two starts of an instance have the same one.
pub fn incarnation() -> Incarnation {
    Incarnation(rand::random())
}

/// A new request id: `req-` and 128 random bits.
pub fn request_id() -> RequestId {
    match RequestId::try_new(format!("req-{:032x}", rand::random::<u128>())) {
        Ok(id) => id,
        Err(error) => unreachable!("{error}"),
    }
}

/// The instance id if none is configured: `{role}-{host}-{pid}`, unique among the running processes of this host.
pub fn default_instance_id(role: &str) -> InstanceId {
    let name: String = format!("{role}-{}-{}", hostname(), std::process::id());
    let name: String =
        name.chars().map(|c| if c.is_ascii_graphic() { c } else { '_' }).take(InstanceId::BYTES_MAX).collect();
    match InstanceId::try_new(name) {
        Ok(id) => id,
        Err(error) => unreachable!("{error}"),
    }
}

/// This host's name, at most 64 characters; `localhost` if it has none.
pub fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| std::env::var("HOSTNAME").ok());
    let name: String = name.unwrap_or_default().trim().chars().take(64).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_drawn_anew_and_stay_within_bounds() {
        assert_ne!(incarnation(), incarnation());
        assert_ne!(request_id(), request_id());
        let id = default_instance_id(&"röle ".repeat(60));
        assert_eq!(id.as_str().len(), InstanceId::BYTES_MAX);
        assert!(default_instance_id("decode").as_str().ends_with(&std::process::id().to_string()));
    }
}
