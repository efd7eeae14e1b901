//! Names of fields that the API does not have: they are ignored, and told.

use baton_types::RequestError;

/// Most names that are told of one body.
const NAMES_MAX: usize = 8;

/// Longest name that is told whole, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// The first names of a body.
#[derive(Debug, Default)]
pub(crate) struct Unknown(Vec<String>);

impl Unknown {
    /// Takes note of a field of the body.
    pub(crate) fn tell(&mut self, name: &str) {
        self.add(told(name));
    }

    /// The same, of a field inside another, such as `messages[3]`: of all items of a list a name is told once, as `messages[].name`.
    pub(crate) fn tell_inside(&mut self, at: &str, name: &str) {
        let list: String = at.chars().filter(|c| !c.is_ascii_digit()).collect();
        self.add(format!("{list}.{}", told(name)));
    }

    fn add(&mut self, name: String) {
        if self.0.len() < NAMES_MAX && !self.0.contains(&name) {
            self.0.push(name);
        }
    }

    pub(crate) fn into_names(self) -> Vec<String> {
        self.0
    }

    /// Refuses the body if it has such fields.
    pub(crate) fn check_none(&self) -> Result<(), RequestError> {
        match self.0.first() {
            Some(name) => Err(RequestError::invalid(name.clone(), format!("unknown field {name}"))),
            None => Ok(()),
        }
    }
}

/// The part of a name that is told, as a header can have it.
fn told(name: &str) -> String {
    let told = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
    name.chars().take(NAME_BYTES_MAX).map(told).collect()
}
