//! Reads the key of a call.

use super::Denied;
use http::{HeaderMap, header};

/// Longest key that is accepted, in bytes.
const KEY_BYTES_MAX: usize = 512;

/// The key in `authorization: Bearer KEY`. Two such headers are refused: a proxy may have checked the other one.
pub(super) fn key(headers: &HeaderMap) -> Result<&[u8], Denied> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return Err(Denied::NoKey) };
    let (scheme, key) = value.as_bytes().split_at_checked(7).ok_or(Denied::NoKey)?;
    let key = key.trim_ascii();
    if !scheme.eq_ignore_ascii_case(b"Bearer ") || key.is_empty() {
        return Err(Denied::NoKey);
    }
    if key.len() > KEY_BYTES_MAX {
        return Err(Denied::UnknownKey);
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_follows_bearer() {
        let check = |values: &[&str], expected: Result<&str, Denied>| {
            let headers = values.iter().map(|v| (header::AUTHORIZATION, v.parse().unwrap()));
            assert_eq!(key(&headers.collect()), expected.map(str::as_bytes), "{values:?}");
        };
        check(&["Bearer abc"], Ok("abc"));
        check(&["bearer  abc "], Ok("abc"));
        for none in [&[][..], &["Bearer"], &["Bearer "], &["Basic abc"], &["abc"], &["Bearer a", "Bearer a"]] {
            check(none, Err(Denied::NoKey));
        }
        let longest = "k".repeat(KEY_BYTES_MAX);
        check(&[&format!("Bearer {longest}")], Ok(&longest));
        check(&[&format!("Bearer {longest}k")], Err(Denied::UnknownKey));
    }
}
