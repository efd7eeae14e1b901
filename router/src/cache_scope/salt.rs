//! Salts, which separate the prefixes of tenants.

use baton_types::TenantId;

/// Domain separation of the derivation. Another text gives other salts, so all routers that use it lose what workers
/// have cached.
const CONTEXT: &str = "baton 2026-11-22 prefix cache, salt of a tenant";

/// The salt of a tenant, combined with the salt of the request if it has one. Each part is preceded by its length, so
/// different inputs never give the same text: no tenant name and request salt can imitate another pair.
pub(super) fn salt(secret: &str, tenant: &TenantId, narrowed: Option<&str>) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    for part in [Some(secret), Some(tenant.as_str()), narrowed].into_iter().flatten() {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn of(secret: &str, tenant: &str, narrowed: Option<&str>) -> Vec<u8> {
        salt(secret, &TenantId::try_new(tenant).unwrap(), narrowed)
    }

    #[test]
    fn everything_that_differs_makes_another_salt() {
        let (mut salts, mut asked) = (BTreeSet::new(), 0);
        for secret in ["", "a secret of ours", "another of ours!"] {
            for tenant in ["alice", "bob", "ali", "alicebob"] {
                for narrowed in [None, Some("bob"), Some("cebob"), Some("alice"), Some("s")] {
                    salts.insert(of(secret, tenant, narrowed));
                    asked += 1;
                }
            }
        }
        assert_eq!(salts.len(), asked);
        assert!(salts.iter().all(|salt| salt.len() <= baton_types::CacheUse::SALT_BYTES_MAX));
    }

    #[test]
    fn all_routers_derive_the_same_one() {
        assert_eq!(of("a secret of ours", "alice", Some("s")), of("a secret of ours", "alice", Some("s")));
        // A changed derivation loses every cached prefix of a cluster while its routers are upgraded.
        let hex = hex::encode(of("a secret of ours", "alice", None));
        expect_test::expect!["605033006d1ebec7c2638f8d2abc70d9d2cf41dac4e15582332e23987d155f7e"].assert_eq(&hex);
    }
}
