//! Lines for whoever watches the console of the sandbox.

use std::fmt;
use std::io::Write;

/// Writes one line to standard error, which is the console in a guest.
///
/// The console is opened non-blocking: a line nobody takes is dropped rather than waited for.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("aenv: {text}\n").as_bytes());
}

/// `format!` for [`line`].
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => { $crate::log::line(format_args!($($part)*)) };
}
