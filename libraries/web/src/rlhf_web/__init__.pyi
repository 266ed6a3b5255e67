from .servers import ServerLimits as ServerLimits
from .servers import address_parts as address_parts
from .servers import bound_socket as bound_socket
from .servers import environment_key as environment_key
from .servers import server_key as server_key
from .untrusted_json import UnreadableJson as UnreadableJson
from .untrusted_json import read_first_json as read_first_json
