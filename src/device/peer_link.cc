#include "src/device/peer_link.h"

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"

namespace sluice {

absl::Status CheckPeerLinkOptions(const PeerLinkOptions& options) {
  if (options.message_bytes == 0 || options.message_bytes > kMaxLinkMessageBytes) {
    return InvalidField("message_bytes", absl::StrCat("must be in [1, ", kMaxLinkMessageBytes,
                                                      "], found ", options.message_bytes));
  }
  if (options.depth < 1 || options.depth > kMaxLinkDepth) {
    return InvalidField("depth",
                        absl::StrCat("must be in [1, ", kMaxLinkDepth, "], found ", options.depth));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> PeerLink::BytesOf(absl::Span<const Piece> pieces) const {
  size_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes > message_bytes_ - bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("a message of this link has at most ", message_bytes_, " bytes"));
    }
    bytes += piece.bytes;
  }
  if (bytes == 0) return absl::InvalidArgumentError("a message of a link has at least one byte");
  return bytes;
}

absl::Status PeerLink::Send(absl::Span<const Piece> pieces, bool checksum) {
  SLUICE_ASSIGN_OR_RETURN(const size_t bytes, BytesOf(pieces));
  if (SLUICE_FAILPOINT(kLinkSend)) Abort("failpoint link.send");
  return SendMessage(pieces, bytes, checksum);
}

absl::Status PeerLink::Receive(absl::Span<const Piece> pieces) {
  SLUICE_ASSIGN_OR_RETURN(const size_t bytes, BytesOf(pieces));
  return ReceiveMessage(pieces, bytes);
}

}  // namespace sluice
