//! The one link to the outside.

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use sys::link::Links;

use super::commandline::CommandLine;
use crate::etc;

const DEVICE: &str = "eth0";

/// Brings up the loopback and the link, with its address and default route.
pub(super) fn up(line: &CommandLine) -> io::Result<()> {
    let links = Links::open()?;
    links.up("lo")?;
    links.set_address(DEVICE, line.address, line.prefix)?;
    links.up(DEVICE)?;
    links.set_default_route(line.gateway)
}

/// Names are asked for at *server*, whatever the image says or links to.
pub(super) fn write_resolver(server: Ipv4Addr) -> io::Result<()> {
    etc::replace(Path::new("/etc/resolv.conf"), &format!("nameserver {server}\n"), 0o644, false)
}
