//! The models of the cluster: by name, with their text.
//!
//! Workers own models. The router learns cards from records and fetches text bundles by digest from whichever worker has them.

mod bundle;
mod lookup;
mod text;

pub use bundle::{BundleError, TextCache};
pub use lookup::lookup;
pub use text::ModelText;
