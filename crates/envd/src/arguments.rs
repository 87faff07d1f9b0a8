//! The command line: which role this process has.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;

pub(crate) const USAGE: &str = "\
usage: envd serve --port N [--bind ADDRESS] [--no-cgroup | --cgroup DIRECTORY] [--identity]

  --port N            listen on this TCP port; 0 picks one and prints it
  --bind ADDRESS      listen on this address (127.0.0.1)
  --no-cgroup         processes stay in the daemon's control group; nothing can be frozen
  --cgroup DIRECTORY  make control groups below this directory of a cgroup2 file system
  --identity          let /init change the host name and files below /etc: only in a container";

pub(crate) const PORT: u16 = 49_983;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Role {
    FirstProcess,
    Supervisor(Inherited),
    Daemon(Inherited),
    Serve(ServeOptions),
}

/// What a process of ours gets from the one that started it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inherited {
    pub state: RawFd,
    /// Root of the control groups, if there are any.
    pub cgroup: Option<RawFd>,
    /// How often the daemon was started before.
    pub restarts: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ServeOptions {
    pub address: SocketAddr,
    pub cgroup: CgroupChoice,
    pub identity: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CgroupChoice {
    None,
    /// A group of our own in the cgroup2 file system, wherever it is mounted.
    Own,
    Below(PathBuf),
}

impl Inherited {
    pub(crate) fn arguments(&self, role: &str) -> Vec<String> {
        let mut all = vec![role.to_owned(), self.state.to_string(), self.restarts.to_string()];
        all.extend(self.cgroup.map(|fd| fd.to_string()));
        all
    }

    fn parse(arguments: &[String]) -> Result<Self, String> {
        let number = |text: &String| text.parse().map_err(|_| format!("{text} is not the number of a descriptor"));
        match arguments {
            [state, restarts, cgroup @ ..] if cgroup.len() <= 1 => Ok(Self {
                state: number(state)?,
                restarts: restarts.parse().map_err(|_| format!("{restarts} is not a count"))?,
                cgroup: cgroup.first().map(number).transpose()?,
            }),
            _ => Err("this role is for envd itself".to_owned()),
        }
    }
}

/// # Errors
/// A sentence about what is wrong.
pub(crate) fn role(arguments: Vec<String>, pid: u32) -> Result<Role, String> {
    let mut arguments = arguments.into_iter().skip(1);
    match arguments.next().as_deref() {
        Some("serve") => serve(arguments).map(Role::Serve),
        Some("daemon") => Inherited::parse(&arguments.collect::<Vec<_>>()).map(Role::Daemon),
        Some("supervise") => Inherited::parse(&arguments.collect::<Vec<_>>()).map(Role::Supervisor),
        // The kernel may hand words of its command line to the first process.
        _ if pid == 1 => Ok(Role::FirstProcess),
        Some(other) => Err(format!("{other} is not a command")),
        None => Err("no command is given".to_owned()),
    }
}

fn serve(mut arguments: impl Iterator<Item = String>) -> Result<ServeOptions, String> {
    let (mut port, mut bind, mut cgroup, mut identity) =
        (None, IpAddr::V4(Ipv4Addr::LOCALHOST), CgroupChoice::Own, false);
    while let Some(option) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{option} needs a value"));
        match option.as_str() {
            "--port" => port = Some(value()?.parse().map_err(|_| "--port needs a number up to 65535".to_owned())?),
            "--bind" => bind = value()?.parse().map_err(|_| "--bind needs an IP address".to_owned())?,
            "--no-cgroup" => cgroup = CgroupChoice::None,
            "--cgroup" => cgroup = CgroupChoice::Below(value()?.into()),
            "--identity" => identity = true,
            other => return Err(format!("{other} is not an option")),
        }
    }
    let port = port.ok_or("--port is needed")?;
    Ok(ServeOptions { address: SocketAddr::new(bind, port), cgroup, identity })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, pid: u32) -> Result<Role, String> {
        role(line.split(' ').map(str::to_owned).collect(), pid)
    }

    #[test]
    fn roles() {
        assert_eq!(parse("/init", 1), Ok(Role::FirstProcess));
        assert_eq!(parse("/init quiet", 1), Ok(Role::FirstProcess));
        assert!(parse("envd", 7).is_err());
        assert!(parse("envd daemon", 7).is_err());
        let inherited = Inherited { state: 3, cgroup: Some(4), restarts: 2 };
        let line = format!("envd {}", inherited.arguments("daemon").join(" "));
        assert_eq!(parse(&line, 7), Ok(Role::Daemon(inherited)));
    }

    #[test]
    fn serving_on_a_host() {
        let expected =
            ServeOptions { address: ([127, 0, 0, 1], 5000).into(), cgroup: CgroupChoice::None, identity: false };
        assert_eq!(parse("envd serve --port 5000 --no-cgroup", 7), Ok(Role::Serve(expected)));
        for bad in ["envd serve", "envd serve --port", "envd serve --port x", "envd serve --port 1 --what"] {
            assert!(parse(bad, 7).is_err(), "{bad}");
        }
    }
}
