//! IPv4 addresses, link state and the default route, through the classic ioctls.
//!
//! They need neither a tool from the image nor a netlink library.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A socket through which network interfaces are changed.
pub struct Links(OwnedFd);

impl Links {
    /// # Errors
    /// Those of `socket`.
    pub fn open() -> io::Result<Self> {
        // SAFETY: takes numbers; the result is checked before it is owned.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and known to nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// # Errors
    /// When there is no such interface, or the kernel refuses.
    pub fn up(&self, name: &str) -> io::Result<()> {
        let mut request = request(name)?;
        self.call(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the kernel has just filled this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        #[expect(clippy::cast_possible_truncation, reason = "IFF_UP is 1")]
        let up = flags | libc::IFF_UP as libc::c_short;
        request.ifr_ifru.ifru_flags = up;
        self.call(libc::SIOCSIFFLAGS, &mut request)
    }

    /// # Errors
    /// When there is no such interface, or the kernel refuses.
    pub fn set_address(&self, name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut request = request(name)?;
        request.ifr_ifru.ifru_addr = socket_address(address);
        self.call(libc::SIOCSIFADDR, &mut request)?;
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
        request.ifr_ifru.ifru_netmask = socket_address(Ipv4Addr::from(mask));
        self.call(libc::SIOCSIFNETMASK, &mut request)
    }

    /// Sends everything that has no nearer route to *gateway*. A route that is there already is fine.
    ///
    /// # Errors
    /// When the gateway is not on a link that is up.
    pub fn set_default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        // SAFETY: all members are numbers, addresses or a pointer, for which zero is a valid value.
        let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
        route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = socket_address(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        // SAFETY: the kernel reads one rtentry, whose device pointer is null.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SIOCADDRT, &raw const route) };
        match (done, io::Error::last_os_error()) {
            (0, _) => Ok(()),
            (_, error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            (_, error) => Err(error),
        }
    }

    fn call(&self, number: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: all requests made here read or write one ifreq, which outlives the call.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), number, std::ptr::from_mut(request)) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all members are numbers, addresses or pointers, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = libc::c_char::from_ne_bytes([byte]);
    }
    Ok(request)
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: zero is a valid value of both, they have the same size, and sockaddr has no padding that is read.
    unsafe {
        let mut inet: libc::sockaddr_in = std::mem::zeroed();
        inet.sin_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0);
        inet.sin_addr.s_addr = u32::from_ne_bytes(address.octets());
        std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet)
    }
}
