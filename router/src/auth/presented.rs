//! Reads the key of a call.

use super::Denied;
use http::{HeaderMap, HeaderName, header};

/// Longest key that is accepted, in bytes.
pub(super) const KEY_BYTES_MAX: usize = 512;

/// Where a key may be: `authorization: Bearer KEY`, or `x-api-key: KEY`, as clients of Anthropic's API send it.
pub(crate) const KEY_HEADERS: [HeaderName; 2] = [header::AUTHORIZATION, HeaderName::from_static("x-api-key")];

/// The key of a call. Two headers of one name are refused, and so are two keys: a proxy may have checked the other one.
pub(super) fn key(headers: &HeaderMap) -> Result<&[u8], Denied> {
    let [bearer, plain] = KEY_HEADERS;
    let key = match (one(headers, &bearer)?, one(headers, &plain)?) {
        (None, None) => return Err(Denied::NoKey),
        (Some(value), None) => bearer_of(value)?,
        (None, Some(key)) => key,
        (Some(value), Some(key)) => Some(bearer_of(value)?).filter(|same| *same == key).ok_or(Denied::NoKey)?,
    };
    if key.is_empty() {
        return Err(Denied::NoKey);
    }
    if key.len() > KEY_BYTES_MAX {
        return Err(Denied::UnknownKey);
    }
    Ok(key)
}

/// The value of a header that is there at most once.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, Denied> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (value, None) => Ok(value.map(|value| value.as_bytes().trim_ascii())),
        _ => Err(Denied::NoKey),
    }
}

fn bearer_of(value: &[u8]) -> Result<&[u8], Denied> {
    let (scheme, key) = value.split_at_checked(7).ok_or(Denied::NoKey)?;
    if scheme.eq_ignore_ascii_case(b"Bearer ") { Ok(key.trim_ascii()) } else { Err(Denied::NoKey) }
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
        let both = |bearer: &[&str], plain: &[&str]| {
            let bearer = bearer.iter().map(|v| (header::AUTHORIZATION, v.parse().unwrap()));
            let plain = plain.iter().map(|v| (KEY_HEADERS[1].clone(), v.parse().unwrap()));
            key(&bearer.chain(plain).collect()).map(<[u8]>::to_vec)
        };
        assert_eq!(both(&[], &["abc"]), Ok(b"abc".to_vec()));
        assert_eq!(both(&["Bearer abc"], &["abc"]), Ok(b"abc".to_vec()));
        for (bearer, plain) in [
            (&[][..], &[""][..]),
            (&[], &["a", "a"]),
            (&["Bearer a"], &["b"]),
            (&["Basic a"], &["a"]),
            (&["Bearer a", "Bearer a"], &["a"]),
        ] {
            assert_eq!(both(bearer, plain), Err(Denied::NoKey), "{bearer:?} {plain:?}");
        }
        let longest = "k".repeat(KEY_BYTES_MAX);
        check(&[&format!("Bearer {longest}")], Ok(&longest));
        check(&[&format!("Bearer {longest}k")], Err(Denied::UnknownKey));
    }
}
